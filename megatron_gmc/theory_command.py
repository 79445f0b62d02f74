"""`theory`: what each cap costs at a measured sd(ℓ), and what to change about it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.table import Table

from megatron_gmc.errors import ConfigError, blamed_on
from megatron_gmc.metrics import read_metrics
from megatron_gmc.run_folder import RunFolder
from megatron_gmc.theory import bounds, log_normal

TARGET = 0.05
"""The deficit that the advice aims at: 95 % of the expected gradient weight survives."""

STARVING_SD = 3.0
"""From here on every trajectory-level weight loses most of its mass at ordinary group sizes."""

MISMATCH_SD = 1.0
"""sd(ℓ) at lag 0 from which engine and learner themselves disagree too much."""

_SIZES = (1, 4, 8, 16, 32, 64, 256)


@dataclass(frozen=True)
class Measured:
    """What a run's folder says; None where it does not."""

    sd: float | None = None
    sd_lag0: float | None = None
    retained: float | None = None
    group_size: int | None = None
    epsilon: float | None = None


def theory(
    folder: Path | None, *, sd: float | None, group_size: int | None, epsilon: float | None
) -> int:
    """Print table and advice; returns the exit code. What is given wins over what the run says.

    Raises ConfigError where there is no sd(ℓ), or a value is out of its range.
    """
    torch.set_num_threads(1)
    measured = Measured() if folder is None else _measured(folder)
    sd = measured.sd if sd is None else sd
    if sd is None and folder is not None:
        raise ConfigError(f"{folder} has no ratio/log_ratio_sd in its metrics.jsonl; give --sd")
    if sd is None:
        raise ConfigError("theory: give --sd, the sd of the log-ratios, or the folder of a run")
    group_size = group_size if group_size is not None else measured.group_size or 8
    epsilon = epsilon if epsilon is not None else measured.epsilon or 0.2
    if not 0 < epsilon < math.inf:
        raise ConfigError(f"--epsilon must be finite and above 0, got {epsilon:g}")
    if not 1 <= group_size <= log_normal.LARGEST_GROUP:
        raise ConfigError(
            f"--group-size must be between 1 and {log_normal.LARGEST_GROUP}, got {group_size}"
        )
    if not 0 <= sd < math.inf:
        raise ConfigError(f"--sd must be finite and at least 0, got {sd:g}")
    console = Console(highlight=False)
    if sd == 0:
        console.print("sd(ℓ) is 0: every ratio is 1, no cap does anything, all methods coincide.")
        return 0
    console.print(_table(sd, group_size, epsilon))
    for line in (*_advice(sd, group_size, epsilon), *_comparison(measured, sd, group_size)):
        console.print(f"• {line}")
    return 0


def _measured(folder: Path) -> Measured:
    run = RunFolder(folder)
    if not run.metrics.exists():
        raise ConfigError(f"{folder} holds no metrics.jsonl; give the folder of a run, or --sd")
    with blamed_on(str(run.metrics)):
        series = read_metrics(run.metrics)
    tree = yaml.safe_load(run.config.read_text()) if run.config.exists() else {}
    return Measured(
        sd=_typical(series.get("ratio/log_ratio_sd", [])),
        sd_lag0=_typical(series.get("ratio/log_ratio_sd_lag0", [])),
        retained=_typical(series.get("ratio/retained_mass", [])),
        group_size=tree.get("rollout", {}).get("group_size"),
        epsilon=tree.get("estimator", {}).get("epsilon"),
    )


def _typical(points: list[tuple[int, float]]) -> float | None:
    """Median over the later half of the steps: the first ones have not reached their lag yet."""
    values = [value for _, value in points[len(points) // 2 :] if math.isfinite(value)]
    return statistics.median(values) if values else None


def _table(sd: float, group_size: int, epsilon: float) -> Table:
    table = Table(
        title=f"log-normal ratios, sd(ℓ) = {sd:g}, ε = {epsilon:g}: retained mass (deficit)"
    )
    for column in ("G", "GMC", "TIC-clip", "TIC-mask"):
        table.add_column(column, justify="right")
    for size in sorted({*_SIZES, group_size}):
        kept = log_normal.retained_mass(sd, size, epsilon)
        cells = [f"{m:.3f} ({1 - m:.3f})" for m in (kept.gmc, kept.tic_clip, kept.tic_mask)]
        style = "bold" if size == group_size else ""
        table.add_row(str(size), *cells, style=style)
    return table


def _advice(sd: float, group_size: int, epsilon: float) -> Iterator[str]:
    deficit = log_normal.gmc_deficit(sd, group_size, epsilon).value
    yield (
        f"GMC at G = {group_size} loses {deficit:.1%} of the expected gradient weight, TIC-clip "
        f"{log_normal.tic_clip_deficit(sd, epsilon):.1%} and TIC-mask "
        f"{log_normal.tic_mask_deficit(sd, epsilon):.1%} at every G."
    )
    yield _group_advice(sd, epsilon)
    if deficit <= TARGET:
        yield f"G and ε are enough for {TARGET:.0%} at this lag; nothing has to change."
        return
    yield _epsilon_advice(sd, group_size, epsilon)
    bearable = log_normal.sd_for(TARGET, group_size, epsilon)
    yield (
        f"Lag: sd(ℓ) ≤ {bearable:.2f} would do at this G and ε. sd(ℓ) grows about in proportion "
        f"to lag × step size as long as it is small, so try about {bearable / sd:.0%} of either."
    )
    if sd >= STARVING_SD:
        yield (
            "At this sd(ℓ) every trajectory-level weight starves and no G helps much. Look at "
            "ratio/log_ratio_sd_lag0 first: without lag it is engine/learner mismatch alone."
        )


def _group_advice(sd: float, epsilon: float) -> str:
    needed = log_normal.group_size_for(TARGET, sd, epsilon)
    variance = log_normal.ratio_variance(sd)
    shown = f"more than {log_normal.LARGEST_GROUP}" if needed is None else str(needed)
    line = f"G for a deficit of {TARGET:.0%}: {shown}, if ℓ is normal"
    if variance == math.inf:
        return line + "."
    enough = bounds.sufficient_group_size(variance, epsilon, TARGET)
    return line + f"; {enough:,} suffice for any law of this variance."


def _epsilon_advice(sd: float, group_size: int, epsilon: float) -> str:
    wanted = log_normal.epsilon_for(TARGET, sd, group_size)
    if wanted is None:
        return f"ε: none up to {log_normal.LARGEST_EPSILON:g} brings it to {TARGET:.0%} at this G."
    growth = ((1 + wanted) / (1 + epsilon)) ** 2
    return (
        f"ε: {wanted:.2f} brings it to {TARGET:.0%} at this G; the bound of the gradient's second "
        f"moment, (1 + ε)²B², is {growth:.1f} times as large then."
    )


def _comparison(measured: Measured, sd: float, group_size: int) -> Iterator[str]:
    if measured.retained is not None and measured.epsilon is not None:
        kept = log_normal.retained_mass(sd, group_size, measured.epsilon)
        yield (
            f"The run's own retained mass is {measured.retained:.3f}; log-normal ratios would have "
            f"{kept.gmc:.3f} (GMC), {kept.tic_clip:.3f} (TIC-clip), {kept.tic_mask:.3f} (mask)."
        )
    if measured.sd_lag0 is not None and measured.sd_lag0 > MISMATCH_SD:
        yield (
            f"sd(ℓ) at lag 0 is {measured.sd_lag0:.2f}, above {MISMATCH_SD:g}: engine and learner "
            "disagree apart from staleness. Correct that per token, shorten responses, or compute "
            "the head in fp32, before anything about lag."
        )
