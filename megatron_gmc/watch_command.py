"""`watch`: a run of any process, in the terminal, from its files alone."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_gmc.errors import ConfigError
from megatron_gmc.run_folder import RunFolder
from megatron_gmc.run_record import ACCURACY, RunRecord
from megatron_gmc.signs import bad_signs, by_idleness

_SILENT_STEPS = 10
_SILENT_S = 60.0
"""A run counts as silent after so many usual steps, and at least so many seconds, without one."""
_RECENT = 20

# Metric, label, format; the newest value is shown.
_SHOWN = (
    ("reward/mean", "reward", "{:.3f}"),
    (ACCURACY, "held-out accuracy", "{:.3f}"),
    ("lag/mean", "lag, mean", "{:.1f}"),
    ("lag/max", "lag, max", "{:.0f}"),
    ("ratio/capped_share", "capped groups", "{:.0%}"),
    ("ratio/retained_mass", "retained mass", "{:.3f}"),
    ("ratio/log_ratio_sd", "sd(ℓ)", "{:.3f}"),
    ("grad_norm", "gradient norm", "{:.3g}"),
    ("throughput/tokens_per_s", "learner, tokens/s", "{:.0f}"),
    ("rollout/tokens_per_s", "engines, tokens/s", "{:.0f}"),
    ("rollout/queue_groups", "finished groups waiting", "{:.0f}"),
    ("rollout/in_flight_groups", "groups being sampled", "{:.0f}"),
    ("time/step_s", "seconds a step", "{:.2f}"),
)


def watch(folder: Path, *, once: bool, every_s: float) -> int:
    """Show the run until it has finished, or once; returns the exit code.

    Raises ConfigError where `folder` is no run's.
    """
    if not every_s > 0:
        raise ConfigError(f"--every must be above 0 seconds, got {every_s:g}")
    console = Console(highlight=False, markup=False)
    run = RunRecord.read(folder)
    if once:
        console.print(view(run, silent_s(run)))
        return 0
    with Live(view(run, silent_s(run)), console=console, auto_refresh=False) as live:
        while not run.finished:
            time.sleep(every_s)
            run = RunRecord.read(folder)
            live.update(view(run, silent_s(run)), refresh=True)
    return 0


def silent_s(run: RunRecord) -> float:
    """Seconds since the run last wrote a metric."""
    metrics = RunFolder(run.path).metrics
    return max(0.0, time.time() - metrics.stat().st_mtime) if metrics.exists() else 0.0


def view(run: RunRecord, silent: float) -> RenderableType:
    """Everything at a glance; `silent`: seconds since the run last wrote a metric."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    cells = [
        (label, form.format(value))
        for name, label, form in _SHOWN
        if (value := run.last(name)) is not None
    ]
    for place in range(0, len(cells), 2):
        table.add_row(*(part for cell in cells[place : place + 2] for part in cell))
    bar = Table.grid()
    bar.add_row(ProgressBar(total=run.steps, completed=run.step, width=40))
    signs = bad_signs(run)
    warnings = [Text(f"! {sign.text}", style="bold yellow") for sign in signs]
    idle = ", ".join(by_idleness(run))
    return Group(
        Text(f"{run.path}: {run.method}, lag {run.lag}, seed {run.seed}", style="bold"),
        bar,
        Text(", ".join([_state(run, silent), *([idle] if idle else [])])),
        table,
        *(warnings or [Text("no known bad sign", style="dim")]),
    )


def _state(run: RunRecord, silent: float) -> str:
    steps = f"step {run.step} of {run.steps if run.steps is not None else '?'}"
    if run.finished:
        return f"{steps}, finished"
    usual = _usual_step_s(run)
    if usual is None:
        return f"{steps}, nothing recorded yet"
    if silent > max(_SILENT_S, _SILENT_STEPS * usual):
        return f"{steps}, silent for {_clock(silent)}: it has stopped, or a step hangs"
    left = "" if run.steps is None else f", about {_clock((run.steps - run.step) * usual)} left"
    return f"{steps}{left}"


def _usual_step_s(run: RunRecord) -> float | None:
    """Median of the last steps, with what checkpoints add spread over them."""
    seconds = run.values("time/step_s")[-_RECENT:]
    if not seconds:
        return None
    first = run.step - len(seconds)
    points = run.series.get("time/checkpoint_s", [])
    checkpoints = sum(value for step, value in points if step > first)
    return statistics.median(seconds) + checkpoints / len(seconds)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
