"""`megatron-gmc doctor`: whether a machine, or an allocation, is fit for a run.

Alone it looks at this machine; under torchrun or srun at every rank's, and at the network between
them. With a config it also checks the mesh against the model and the disk against checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_gmc.config import Config, MeshConfig
from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.convert.mapping import layouts
from megatron_gmc.launch import checks
from megatron_gmc.launch.checks import Check
from megatron_gmc.settings import load_config
from megatron_gmc.setup_checks import check_model

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}
# Weights and two moments in float32, of which rank 0's disk sees the sum over all ranks.
_CHECKPOINT_BYTES = 12


def doctor(path: Path | None, overrides: Sequence[str]) -> int:
    """Print one line a check; returns the exit code: 0, or 1 where a check failed.

    Raises ConfigError for a config that could not be trained on these ranks.
    """
    config = load_config(Config, path, overrides) if path is not None else None
    shape = None
    if config is not None:
        shape = check_model(config.policy.path, config.mesh, weights=True)
    found = list(_machine(config, shape))
    if "RANK" in os.environ:
        found = _over_ranks(found, config)
    if os.environ.get("RANK", "0") == "0":
        _print(found)
    return int(any(check.state == "failed" for check in found))


def _machine(config: Config | None, shape: ModelShape | None) -> Iterator[Check]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    yield from checks.check_versions(checks.installed())
    yield from checks.check_devices(torch.version.cuda, torch.cuda.device_count(), here)
    yield from checks.check_threads(here)
    yield from checks.check_limits()
    if config is not None and shape is not None:
        kept = config.train.keep_checkpoints + 1
        yield from checks.check_disk(config.train.output_dir, kept * checkpoint_bytes(shape))


def checkpoint_bytes(shape: ModelShape) -> int:
    """Bytes of one checkpoint: weights and AdamW's moments."""
    elements = 0
    for layout in layouts(shape).values():
        count = 1
        for size in layout.shape:
            count *= size
        elements += count
    return elements * _CHECKPOINT_BYTES


def _over_ranks(mine: list[Check], config: Config | None) -> list[Check]:
    """Every rank's checks, those that agree said once, and those of the network."""
    from megatron_gmc.launch.collectives import check_clocks, check_collectives, start_world
    from megatron_gmc.learner.mesh import Mesh

    start_world()
    mesh = Mesh.of(config.mesh if config else MeshConfig())
    everyone: list[list[Check]] = [[] for _ in range(mesh.world_size)]
    dist.all_gather_object(everyone, mine)
    merged = _merge(everyone)
    merged += [*check_collectives(mesh), *check_clocks(mesh)]
    mesh.close()
    dist.destroy_process_group()
    return merged


def _merge(everyone: Sequence[Sequence[Check]]) -> list[Check]:
    ranks: dict[Check, list[int]] = {}
    for rank, found in enumerate(everyone):
        for check in found:
            ranks.setdefault(check, []).append(rank)
    merged = []
    for check, holders in ranks.items():
        if len(holders) == len(everyone):
            merged.append(check)
        else:
            where = ", ".join(map(str, holders))
            merged.append(replace(check, detail=f"rank {where}: {check.detail}"))
    return sorted(merged, key=lambda check: [one.name for one in ranks].index(check.name))


def _print(found: Sequence[Check]) -> None:
    table = Table("check", "", "found", "what to do")
    for check in found:
        style = _STYLES[check.state]
        # As Text, so that brackets in a path are no markup.
        state, detail = Text(check.state, style), Text(check.detail)
        table.add_row(check.name, state, detail, Text(check.remedy))
    Console().print(table)
