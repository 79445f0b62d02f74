"""What can be wrong with a machine before a run: each check gives one line, and a remedy."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from packaging.version import Version

State = Literal["ok", "warning", "failed"]

PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "triton", "sglang")
WRITE_BYTES = 32 * 2**20
SLOW_WRITE = 50e6  # bytes a second; a checkpoint of 10 GB then takes over three minutes
OPEN_FILES = 4096  # sockets and shards of a large mesh come near the usual limit of 1024


@dataclass(frozen=True)
class Check:
    """One line of the report. `remedy` says what to do where the state is not ok."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def installed(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions of those `packages` that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def check_versions(found: Mapping[str, str]) -> Iterator[Check]:
    """Versions, and pairs of them that are known not to work together."""
    listed = ", ".join(f"{name} {number}" for name, number in found.items())
    yield Check("versions", "ok", f"Python {platform.python_version()}, {listed}")
    megatron = found.get("megatron-core")
    if megatron is None:
        yield Check(
            "megatron-core",
            "failed",
            "not installed: no learner can run here",
            "pip install megatron-core",
        )
    elif Version(megatron) < Version("0.16.1"):
        yield Check(
            "megatron-core",
            "failed",
            f"{megatron} is older than what the learner was tried with",
            "pip install 'megatron-core>=0.16.1'",
        )
    elif Version(megatron) >= Version("0.19") and "triton" not in found:
        yield Check(
            "megatron-core",
            "failed",
            f"{megatron} imports triton, which is not installed",
            "pip install triton",
        )


def check_devices(
    cuda_build: str | None, devices: int, ranks_here: int, driver: bool | None = None
) -> Iterator[Check]:
    """CUDA devices against the ranks of this machine.

    `cuda_build` is torch.version.cuda, `devices` what torch sees, `driver` whether the machine
    has an NVIDIA driver (looked up if None).
    """
    has_driver = Path("/dev/nvidiactl").exists() if driver is None else driver
    if has_driver and cuda_build is None:
        yield Check(
            "devices",
            "warning",
            "this machine has an NVIDIA driver, and torch is a build for CPUs",
            "install a CUDA build of torch to use the GPUs",
        )
    elif devices == 0:
        cores = len(os.sched_getaffinity(0))
        state: State = "ok" if cores >= ranks_here else "warning"
        yield Check(
            "devices",
            state,
            f"no GPU; {cores} CPU cores for {_ranks(ranks_here)}",
            "" if state == "ok" else "start as many ranks as there are cores",
        )
    elif devices < ranks_here:
        yield Check(
            "devices",
            "failed",
            f"{devices} GPUs for {_ranks(ranks_here)} on this machine",
            f"start {devices} ranks a machine, or make more GPUs visible",
        )
    else:
        yield Check("devices", "ok", f"{devices} GPUs for {_ranks(ranks_here)} on this machine")


def check_threads(ranks_here: int) -> Iterator[Check]:
    """Threads a rank uses: more than there are cores slows a CPU run down many times."""
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None or not threads.isdigit() or int(threads) * ranks_here <= cores:
        yield Check("threads", "ok", f"OMP_NUM_THREADS {threads or 'unset (1 is used)'}")
        return
    yield Check(
        "threads",
        "warning",
        f"OMP_NUM_THREADS {threads} × {_ranks(ranks_here)} on {cores} cores",
        "export OMP_NUM_THREADS=1",
    )


def check_limits() -> Iterator[Check]:
    """Open files of a process, and shared memory for NCCL and data on one host."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= OPEN_FILES:
        yield Check("open files", "ok", f"{soft} allowed")
    else:
        yield Check("open files", "warning", f"{soft} allowed", f"ulimit -n {min(hard, 65536)}")
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    if shared >= 2**30:
        yield Check("shared memory", "ok", f"{shared / 2**30:.1f} GiB free in /dev/shm")
    else:
        yield Check(
            "shared memory",
            "warning",
            f"{shared / 2**20:.0f} MiB free in /dev/shm",
            "start the container with --shm-size=16g or --ipc=host",
        )


def check_disk(folder: Path, needed: int) -> Iterator[Check]:
    """Space and write speed where the run's folder will lie; `needed` in bytes."""
    place = next(one for one in (folder, *folder.resolve().parents) if one.is_dir())
    free = shutil.disk_usage(place).free
    detail = f"{free / 1e9:.1f} GB free in {place}, {needed / 1e9:.1f} GB needed for checkpoints"
    if free < needed:
        yield Check("disk", "failed", detail, "free space, or choose another train.output_dir")
    else:
        yield Check("disk", "ok", detail)
    try:
        speed = write_speed(place)
    except OSError as error:
        yield Check(
            "disk speed", "failed", f"cannot write to {place}: {error.strerror}", "choose another"
        )
        return
    slow = speed < SLOW_WRITE
    yield Check(
        "disk speed",
        "warning" if slow else "ok",
        f"{speed / 1e6:.0f} MB/s to {place}",
        "checkpoints will be slow; save less often or on another disk" if slow else "",
    )


def write_speed(folder: Path) -> float:
    """Bytes a second of writing and syncing a file in `folder`."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor") as file:
        began = time.perf_counter()
        file.write(os.urandom(2**20) * (WRITE_BYTES // 2**20))
        file.flush()
        os.fsync(file.fileno())
        return WRITE_BYTES / (time.perf_counter() - began)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
