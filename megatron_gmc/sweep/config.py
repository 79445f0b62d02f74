"""The config of `megatron-gmc sweep`, and the runs that it stands for."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, JsonValue

from megatron_gmc.config import Config
from megatron_gmc.errors import ConfigError
from megatron_gmc.section import Section
from megatron_gmc.settings import load_config

Key = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")]
Setting = Annotated[str, Field(pattern=r"^[\w:.,=@/+-]+$")]

_FOLDER = "train.output_dir"
_LONGEST = 200
_UNFIT = re.compile(r"[^\w.+-]+")
"""What has no place in a folder's name."""


class SweepConfig(Section):
    """A sweep: `megatron-gmc sweep`."""

    output_dir: Path
    """Folder of the sweep: configs/, runs/, logs/ and failed/."""
    base: Path
    """Training config that every run starts from."""
    fixed: dict[Key, JsonValue] = Field(default_factory=dict)
    """Fields that are the same in every run and other than in `base`, by dotted key."""
    grids: Annotated[list[dict[Key, Annotated[list[JsonValue], Field(min_length=1)]]],
                     Field(min_length=1)]  # fmt: skip
    """Each is a grid: dotted keys with the values to combine. A key may be a whole section, whose
    values are then mappings. The sweep is all combinations of all grids."""
    slurm: dict[Key, Setting] = Field(default_factory=dict)
    """#SBATCH settings of the array job, such as partition and time; with --slurm only."""


@dataclass(frozen=True)
class PlannedRun:
    """One combination: its name, which is also its folder's, and its whole config."""

    name: str
    config: Config


def planned_runs(sweep: SweepConfig) -> list[PlannedRun]:
    """Every run of the sweep, each config validated whole. Raises ConfigError, naming the run."""
    if _FOLDER in sweep.fixed or any(_FOLDER in grid for grid in sweep.grids):
        raise ConfigError(f"{_FOLDER}: the sweep gives each run a folder of its own; remove it")
    runs: dict[str, PlannedRun] = {}
    for values in _combinations(sweep):
        name = run_name(values)
        if name in runs:
            raise ConfigError(f"grids: {name} stands for two runs; give each combination once")
        if len(name) > _LONGEST:
            raise ConfigError(f"grids: {name} is too long for a folder's name; vary fewer fields")
        folder = str(sweep.output_dir / "runs" / name)
        overrides = {**sweep.fixed, **values, _FOLDER: folder}
        try:
            config = load_config(Config, sweep.base, _arguments(overrides))
        except ConfigError as error:
            raise ConfigError(f"run {name}: {error}") from None
        runs[name] = PlannedRun(name, config)
    return list(runs.values())


def run_name(values: Mapping[str, JsonValue]) -> str:
    """A folder's name that tells the combination, such as gmc_exact-16_seed-0."""
    return "_".join(_named(key.rpartition(".")[2], value) for key, value in values.items())


def _named(key: str, value: JsonValue) -> str:
    if isinstance(value, dict):
        return "_".join(_named(inner, one) for inner, one in value.items())
    text = f"{value:g}" if isinstance(value, float) else str(value)
    fit = _UNFIT.sub("-", text)
    # What a section's kind is called says enough by itself.
    return fit if key in ("name", "type") else f"{key}-{fit}"


def _combinations(sweep: SweepConfig) -> Iterator[dict[str, JsonValue]]:
    for grid in sweep.grids:
        for values in itertools.product(*grid.values()):
            yield dict(zip(grid, values, strict=True))


def _arguments(overrides: Mapping[str, JsonValue]) -> list[str]:
    """As on the command line, so that a key means here what it means there; JSON is YAML."""
    return [part for key, value in overrides.items() for part in (f"--{key}", json.dumps(value))]
