"""What two ranks run for test_train.py: `python -m tests.train_workers function args…`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from megatron_gmc.cli import main
from tests.runs import roll_back


def run_all(folder: str, *names: str) -> None:
    """Run `folder`/NAME.yaml for each name: train, or sft where the name begins so.

    A name that ends in `_resumed` continues what the run without that ending was at version 2.
    """
    # One world for all runs: gloo does not start a second one in the same process.
    dist.init_process_group("gloo")
    for name in names:
        config = Path(folder) / f"{name}.yaml"
        if name.endswith("_resumed"):
            if dist.get_rank() == 0:
                roll_back(Path(folder) / name.removesuffix("_resumed"), Path(folder) / name, 2)
            dist.barrier()
            assert main(["train", str(config), "--resume"]) == 0
        else:
            assert main(["sft" if name.startswith("sft") else "train", str(config)]) == 0
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
