"""Runs a sweep on this machine, a few runs at a time, each on cores of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from megatron_gmc.sweep.config import PlannedRun
from megatron_gmc.sweep.state import SweepFolder

POLL_S = 0.5


@dataclass(frozen=True)
class _Busy:
    name: str
    process: subprocess.Popen[bytes]
    cores: tuple[int, ...]


def core_sets(cores: Sequence[int], jobs: int) -> list[tuple[int, ...]]:
    """One disjoint set of cores for each of `jobs` runs; all cores for each where they are fewer.

    Every core is used; sets differ by at most one core.
    """
    if jobs > len(cores):
        return [tuple(cores)] * jobs
    return [tuple(cores[place::jobs]) for place in range(jobs)]


def run_all(
    folder: SweepFolder,
    runs: Sequence[PlannedRun],
    jobs: int,
    show: Callable[[frozenset[str]], None],
) -> None:
    """Run everything in `runs`, `jobs` at a time; `show` is told which run now, again and again.

    A run that fails is recorded and does not stop the others. An interrupt ends the runs under
    way; they go on where their last checkpoint is when the sweep is started again.
    """
    free = deque(core_sets(sorted(os.sched_getaffinity(0)), jobs))
    waiting = deque(run.name for run in runs)
    busy: list[_Busy] = []
    try:
        while waiting or busy:
            while waiting and free:
                busy.append(_start(folder, waiting.popleft(), free.popleft()))
            time.sleep(POLL_S)
            for one in [one for one in busy if one.process.poll() is not None]:
                busy.remove(one)
                free.append(one.cores)
                if not folder.run(one.name).finished():
                    folder.record_failure(one.name, one.process.returncode)
            show(frozenset(one.name for one in busy))
    finally:
        for one in busy:
            _end(one.process)


def _start(folder: SweepFolder, name: str, cores: tuple[int, ...]) -> _Busy:
    resume = ["--resume"] if folder.prepare(name) else []
    folder.forget_failure(name)
    folder.log(name).parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "megatron_gmc", "train", str(folder.config(name)), *resume]
    # A run under torchrun of its own is no rank of whatever started the sweep.
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with folder.log(name).open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=alone
        )
    os.sched_setaffinity(process.pid, cores)
    return _Busy(name, process, cores)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run and what it started, which its engine notices by itself."""
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    psutil.wait_procs(started, timeout=5)
