"""What a run's folder says, finished or under way: config, metrics, versions; reads files only."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_gmc.errors import ConfigError
from megatron_gmc.metrics import Points, read_metrics
from megatron_gmc.run_folder import RunFolder, flatten

ACCURACY = "evaluation/accuracy"
COLLAPSE = 0.05
"""A run has collapsed if its held-out accuracy ends more than this below its start."""

# These tell apart where and how often a run was done, not what was done.
_NOT_SETTINGS = (
    "train.output_dir",
    "train.seed",
    "train.save_every",
    "train.keep_checkpoints",
    "train.save_trajectories",
    "mesh.",
    "learner.",
)


@dataclass(frozen=True)
class RunRecord:
    """A run as its files tell it. `settings` is the resolved config with dotted keys."""

    path: Path
    settings: dict[str, object]
    series: dict[str, Points]
    versions: dict[str, str]
    finished: bool

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Raises ConfigError where `path` is no run's folder or a file of it is damaged."""
        folder = RunFolder(path)
        if not folder.config.exists():
            raise ConfigError(f"{path} is not the folder of a run: it has no config.yaml")
        try:
            settings = flatten(yaml.safe_load(folder.config.read_text(encoding="utf-8")))
            series = read_metrics(folder.metrics) if folder.metrics.exists() else {}
            versions = path / "versions.json"
            found = json.loads(versions.read_text("utf-8")) if versions.exists() else {}
        except (ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} holds a damaged file: {error}") from None
        return cls(path, settings, series, found, folder.finished())

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.series.get(name, [])]

    def last(self, name: str) -> float | None:
        values = self.values(name)
        return values[-1] if values else None

    def mean(self, name: str) -> float | None:
        values = self.values(name)
        return statistics.fmean(values) if values else None

    @property
    def step(self) -> int:
        """The newest version that the training loop recorded; 0 before the first."""
        points = self.series.get("time/step_s", [])
        return points[-1][0] if points else 0

    @property
    def steps(self) -> int | None:
        return self._whole("train.steps")

    @property
    def group_size(self) -> int | None:
        return self._whole("rollout.group_size")

    @property
    def cap(self) -> float | None:
        """c = 1 + ε, for a method that has an ε."""
        epsilon = self.settings.get("estimator.epsilon")
        return 1 + float(epsilon) if isinstance(epsilon, int | float) else None

    @property
    def method(self) -> str:
        """The estimator and its parameters."""
        parts = [
            f"{key.removeprefix('estimator.')}={plain(value)}"
            for key, value in self.settings.items()
            if key.startswith("estimator.") and key != "estimator.name" and value is not None
        ]
        return " ".join([str(self.settings.get("estimator.name", "?")), *parts])

    @property
    def lag(self) -> str:
        """`16 (exact)` or `≤ 16 (bounded)`."""
        for kind, before in (("exact", ""), ("bounded", "≤ ")):
            value = self.settings.get(f"rollout.lag.{kind}")
            if isinstance(value, int):
                return f"{before}{value} ({kind}{', changing at first' if self._ramped else ''})"
        return "?"

    @property
    def _ramped(self) -> bool:
        """Whether the config gives the first steps other lags."""
        return any(
            key.startswith(("rollout.lag.ramp", "rollout.lag.first")) and bool(value)
            for key, value in self.settings.items()
        )

    @property
    def seed(self) -> int | None:
        return self._whole("train.seed")

    @property
    def collapsed(self) -> bool | None:
        """Whether a finished run ended more than COLLAPSE below its start."""
        accuracy = self.values(ACCURACY)
        if not self.finished or len(accuracy) < 2:
            return None
        return accuracy[-1] < accuracy[0] - COLLAPSE

    def _whole(self, key: str) -> int | None:
        value = self.settings.get(key)
        return value if isinstance(value, int) else None


def plain(value: object) -> str:
    """A setting in a table: numbers without superfluous digits."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def varied(runs: Sequence[RunRecord]) -> list[str]:
    """The settings, seeds and places aside, in which the runs differ; in the configs' order."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return [
        key
        for key in keys
        if not key.startswith(_NOT_SETTINGS)
        and len({json.dumps(run.settings.get(key)) for run in runs}) > 1
    ]
