"""Metrics of a run, to JSONL, TensorBoard, the terminal and, when asked, Weights & Biases."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from megatron_gmc.config import WandbConfig

# What the progress line shows: metric, label, format.
_SHOWN = (
    ("reward/mean", "reward", "{:.2f}"),
    ("evaluation/accuracy", "held-out", "{:.2f}"),
    ("lag/max", "lag", "{:.0f}"),
    ("ratio/capped_share", "capped", "{:.0%}"),
    ("ratio/retained_mass", "retained", "{:.2f}"),
    ("loss", "loss", "{:.3f}"),
    ("throughput/tokens_per_s", "tok/s", "{:.0f}"),
    ("time/step_s", "s/step", "{:.2f}"),
)


class RunLog:
    """One writer for all sinks. `step` is the version that the metrics' step produced."""

    def __init__(
        self,
        folder: Path,
        *,
        title: str,
        steps: int,
        start: int,
        wandb: WandbConfig | None = None,
    ) -> None:
        _drop_unfinished_line(folder / "metrics.jsonl")
        self._jsonl = (folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
        self._wandb = _open_wandb(wandb, folder) if wandb else None
        self._steps = steps
        self._title = title
        self._latest: dict[str, float] = {}
        self._console = Console(file=sys.stdout)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=self._console,
            # A log file gets a line every few steps instead of a bar that redraws itself.
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=steps, completed=start, shown="")
        self._progress.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record what the step to version `step` measured, and move the progress bar there."""
        self.write_aside(step, metrics)
        shown = self._shown()
        self._progress.update(self._task, shown=shown, completed=step)
        regular = step % max(1, self._steps // 10) == 0 or step == self._steps
        if regular and not self._console.is_terminal:
            self._console.print(f"{self._title} {step}/{self._steps}  {shown}", highlight=False)

    def write_aside(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record more metrics of version `step`, which may lie behind the progress bar."""
        # JSON has no NaN or infinity; as text they stay visible.
        clean = {k: v if math.isfinite(v) else str(v) for k, v in metrics.items()}
        self._jsonl.write(json.dumps({"step": step, **clean}) + "\n")
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({"step": step, **metrics})
        self._latest.update(metrics)

    def close(self) -> None:
        self._progress.stop()
        self._jsonl.close()
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(text, highlight=False)

    def _shown(self) -> str:
        return "  ".join(
            f"{label} {form.format(self._latest[name])}"
            for name, label, form in _SHOWN
            if name in self._latest
        )


def _open_wandb(settings: WandbConfig, folder: Path) -> Any:
    """A run of wandb's; one folder goes on as one run there."""
    import wandb

    path = str(folder.resolve())
    run = wandb.init(
        project=settings.project,
        mode=settings.mode,
        name=folder.name,
        id=hashlib.sha256(path.encode()).hexdigest()[:16],
        resume="allow",
        dir=path,
        config=yaml.safe_load((folder / "config.yaml").read_text()),
    )
    # An evaluation is logged later than its step, and wandb's own counter never goes back.
    run.define_metric("*", step_metric="step")
    return run


def _drop_unfinished_line(path: Path) -> None:
    """A run that was killed, or had no room left, may have written half a line."""
    if path.exists():
        written = path.read_bytes()
        os.truncate(path, written.rfind(b"\n") + 1)
