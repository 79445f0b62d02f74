"""The embedded engine's process: `python -m megatron_gmc.rollout.embedded FOLDER --version N`.

The bearer token is the first line of standard input, so that it shows in no process list. Once
the server listens, the process writes one JSON line, {"port": N}, to standard output. It ends on
SIGTERM, and when its standard input closes or its parent is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARENT_CHECK_S = 1.0
SHUTDOWN_S = 1


def main() -> int:
    # SLURM sends what is meant for the ranks to every process of a job step; the run that ends in
    # good order still needs samples, and closes standard input when it does not.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    arguments = _arguments()
    report = _take_over_stdout()
    token = sys.stdin.buffer.readline().decode().strip()
    if not token:
        print("error: the first line of standard input must be a token", file=sys.stderr)
        return 2
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    return _serve(arguments.folder, arguments.version, token, report)


def _serve(folder: Path, version: int, token: str, report: int) -> int:
    # imported here so that a parent that dies during these seconds is noticed
    import torch
    import uvicorn
    from transformers.utils import logging as transformers_logging

    from megatron_gmc.rollout.embedded.server import Policy, build_app
    from megatron_gmc.rollout.embedded.weights import WeightsError, load_folder

    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        policy = Policy(model=load_folder(folder), version=version, folder=folder)
    except WeightsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config = uvicorn.Config(
        build_app(policy, token),
        access_log=False,
        log_level="warning",
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    # with the protocol named, asyncio sets TCP_NODELAY; without it each answer takes 40 ms more
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    os.write(report, json.dumps({"port": listener.getsockname()[1]}).encode() + b"\n")
    os.close(report)

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Leave signals as they are."""
            yield

    Server(config).run(sockets=[listener])
    return 0


def _take_over_stdout() -> int:
    """Keep standard output for the one line: whatever a library prints goes to standard error."""
    report = os.dup(1)
    os.dup2(2, 1)
    return report


def _end_with_parent(parent: int) -> None:
    """End the process when its standard input closes.

    The parent's id is watched too: a process that the parent forked may hold the pipe open.
    """
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], PARENT_CHECK_S)
        if readable and not os.read(0, 4096):
            break
    os._exit(0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megatron_gmc.rollout.embedded")
    parser.add_argument("folder", type=Path, help="a Hugging Face folder with safetensors")
    parser.add_argument("--version", type=int, default=0, help="the version of its weights")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
