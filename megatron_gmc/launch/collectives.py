"""A small all-reduce on every group of the mesh: whether it works, and how fast."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_gmc.launch.checks import Check
from megatron_gmc.learner.mesh import Mesh

ELEMENTS = 2**20
REPEATS = 5
CLOCK_SKEW_S = 1.0
START_TIMEOUT = timedelta(seconds=60)


def start_world() -> None:
    """Join the ranks within a minute; raises ValueError where they do not find each other."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=START_TIMEOUT)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise ValueError(
            f"the ranks did not find each other within {START_TIMEOUT.seconds} s: "
            f"{str(error).splitlines()[0]}; check MASTER_ADDR, the port and the interface "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        ) from None


def groups_of(mesh: Mesh) -> dict[str, ProcessGroup]:
    """The mesh's groups by name: tensor, pipeline, data, …"""
    names = [field.name for field in fields(mesh) if field.name.endswith("_group")]
    return {name.removesuffix("_group"): getattr(mesh, name) for name in names}


def check_collectives(mesh: Mesh) -> Iterator[Check]:
    """One line for each group of more than one rank; collective, in the same order everywhere."""
    for name, group in groups_of(mesh).items():
        size = dist.get_world_size(group)
        if size == 1:
            continue
        value = torch.ones(ELEMENTS, device=mesh.device)
        dist.all_reduce(value, group=group)
        if not bool((value == size).all()):
            yield Check(
                f"all-reduce, {name}",
                "failed",
                f"the sum over {size} ranks is wrong",
                "the network or its driver corrupts data: test it with nccl-tests",
            )
            continue
        seconds = statistics.median(_timed(value, group) for _ in range(REPEATS))
        # What a ring moves over each link.
        moved = 2 * (size - 1) / size * value.numel() * value.element_size()
        yield Check(f"all-reduce, {name}", "ok", f"{size} ranks, {moved / seconds / 1e9:.2f} GB/s")


def check_clocks(mesh: Mesh) -> Iterator[Check]:
    """Clocks of the machines: logs and file times of different ranks are compared by people."""
    if mesh.world_size == 1:
        return
    dist.barrier()
    now = torch.zeros(mesh.world_size, dtype=torch.float64, device=mesh.device)
    now[mesh.rank] = time.time()
    dist.all_reduce(now)
    skew = float(now.max() - now.min())
    good = skew < CLOCK_SKEW_S
    yield Check(
        "clocks",
        "ok" if good else "warning",
        f"ranks differ by {skew:.3f} s",
        "" if good else "synchronise the machines' clocks (chrony, ntp)",
    )


def _timed(value: torch.Tensor, group: ProcessGroup) -> float:
    dist.barrier(group)
    began = time.perf_counter()
    dist.all_reduce(value, group=group)
    if value.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began
