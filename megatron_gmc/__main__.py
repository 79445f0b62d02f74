"""`python -m megatron_gmc`, alone or under torchrun."""

import sys

from megatron_gmc.cli import main

if __name__ == "__main__":
    sys.exit(main())
