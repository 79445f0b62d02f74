"""Run a function of a test module on real gloo ranks, each its own process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_ranks(
    module: str,
    function: str,
    world_size: int,
    *args: str,
    timeout: float = 180,
    path: Sequence[str] = (),
) -> list[str]:
    """Run `python -m module function args…` on `world_size` ranks; return each rank's stdout.

    `path` adds folders that the ranks import from.

    Raises AssertionError with the failing rank's output; the other ranks are then killed.
    """
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *path]),
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}" for rank in range(world_size)]
        ranks = []
        for rank, log in enumerate(logs):
            with log.open("wb") as out, log.with_suffix(".err").open("wb") as err:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, function, *args],
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=out,
                        stderr=err,
                        cwd=ROOT,
                    )
                )
        try:
            _wait(ranks, logs, timeout)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return [log.read_text() for log in logs]


def _wait(ranks: list[subprocess.Popen[bytes]], logs: list[Path], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                errors = logs[rank].with_suffix(".err").read_text()[-6000:]
                raise AssertionError(f"rank {rank} ended with {code}:\n{errors}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            errors = logs[waiting[0]].with_suffix(".err").read_text()[-3000:]
            raise AssertionError(f"ranks {waiting} still run after {timeout} s:\n{errors}")
        time.sleep(0.05)
