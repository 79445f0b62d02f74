"""A SGLang server that ends with its parent: `python serve.py [SGLang's options]`.

Run it as a file, with the interpreter that has SGLang. The first line of standard input is a JSON
object with api_key and admin_api_key, so that they show in no process list. With
MEGATRON_GMC_SGLANG_CPU=1 in the environment SGLang loads without CUDA (see cpu_stand_ins).
"""

from __future__ import annotations

import json
import os
import sys
import threading

if os.environ.get("MEGATRON_GMC_SGLANG_CPU") == "1":
    # above everything else: SGLang's own processes load this file anew before they load SGLang
    import cpu_stand_ins  # type: ignore[import-not-found]

    cpu_stand_ins.install()


def main() -> int:
    keys = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    secret = ["--api-key", keys["api_key"], "--admin-api-key", keys["admin_api_key"]]
    try:
        run_server(prepare_server_args([*sys.argv[1:], *secret]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def _end_with_parent() -> None:
    """End the server and its processes when standard input closes."""
    while os.read(0, 4096):
        pass
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid())


if __name__ == "__main__":
    sys.exit(main())
