"""What the page's script gets: runs, thinned series, charts and comparisons, as plain JSON."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_gmc.metrics import Points
from megatron_gmc.report.charts import Chart, available
from megatron_gmc.run_record import ACCURACY, RunRecord, plain, varied
from megatron_gmc.signs import bad_signs

Json = dict[str, object]

POINTS = 150_000
"""Points of all series of all runs that a report holds; longer series are thinned evenly."""
LEAST_POINTS = 50
MOST_POINTS = 1000

COLOURED_RUNS = 8
"""With more runs than this, colour stands for the method and not for the run."""


def payload(runs: Sequence[RunRecord]) -> Json:
    """Everything about `runs` but their trajectories."""
    names = labels([run.path for run in runs])
    keys = varied(runs)
    by_run = len(runs) <= COLOURED_RUNS
    charts = available(
        itertools.chain.from_iterable(run.series for run in runs), many=len(runs) > 1
    )
    limit = points_limit(len(runs), sum(len(chart.fields) for chart in charts))
    described = [
        _run(run, name, keys, by_run=by_run, metrics=_metrics(charts), limit=limit)
        for run, name in zip(runs, names, strict=True)
    ]
    return {
        "runs": described,
        "keys": list(dict.fromkeys(str(one["key"]) for one in described)),
        "methods": list(dict.fromkeys(str(one["method"]) for one in described)),
        "lags": sorted({run.lag for run in runs}, key=natural),
        "filters": {key: _choices(runs, key) for key in keys if len(runs) > 2},
        "charts": [chart.payload() for chart in charts],
        "cells": cells(runs),
        "limit": limit,
    }


def labels(paths: Sequence[Path]) -> list[str]:
    """What tells the runs' folders apart: their paths below the folder that they share."""
    absolute = [path.resolve() for path in paths]
    if len(absolute) == 1:
        return [absolute[0].name]
    shared = Path(os.path.commonpath(absolute))
    return [str(path.relative_to(shared)) for path in absolute]


def points_limit(runs: int, metrics: int) -> int:
    """Points that one series may have."""
    return max(LEAST_POINTS, min(MOST_POINTS, POINTS // max(1, runs * metrics)))


def thinned(points: Points, limit: int) -> Points:
    """Every n-th point and the last one, with the least n that leaves at most about `limit`."""
    stride = max(1, math.ceil(len(points) / limit))
    kept = points[::stride]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def cells(runs: Sequence[RunRecord]) -> list[Json]:
    """One row for each combination of settings: its runs, which differ in their seeds alone.

    Means are over the finished runs; `_se` is the standard error over them, None for one run.
    """
    keys = varied(runs)
    grouped: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        name = tuple(plain(run.settings.get(key)) for key in keys)
        grouped.setdefault(name, []).append(run)
    rows = [_cell(members) for members in grouped.values()]
    return sorted(rows, key=lambda row: natural(str(row["lag"])))


def _cell(members: Sequence[RunRecord]) -> Json:
    done = [run for run in members if run.finished]
    first, settings = members[0], members[0].settings
    collapsed = [run.collapsed for run in done if run.collapsed is not None]
    row: Json = {
        "method": first.method,
        "lag": first.lag,
        "group_size": settings.get("rollout.group_size"),
        "prompts": settings.get("train.prompts_per_step"),
        "steps": settings.get("train.steps"),
        "aggregation": settings.get("objective.aggregation"),
        "advantage": settings.get("objective.advantage"),
        "optimizer": settings.get("optim.name"),
        "lr": settings.get("optim.lr"),
        "clip_grad": settings.get("optim.clip_grad"),
        "seeds": sorted(run.seed for run in done if run.seed is not None),
        "runs": len(members),
        "finished": len(done),
        "collapsed": statistics.fmean(collapsed) if collapsed else None,
    }
    measures = {
        "start": [run.values(ACCURACY)[:1] for run in done],
        "final": [run.values(ACCURACY)[-1:] for run in done],
        "best": [[max(run.values(ACCURACY))] if run.values(ACCURACY) else [] for run in done],
        "retained": [_present(run.mean("ratio/retained_mass")) for run in done],
        "spread": [_present(run.mean("ratio/log_ratio_sd")) for run in done],
        "ess": [_present(run.mean("ratio/ess")) for run in done],
    }
    for name, lists in measures.items():
        values = [value for one in lists for value in one]
        row[name] = statistics.fmean(values) if values else None
        row[f"{name}_se"] = standard_error(values)
    return row


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None for fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def natural(text: str) -> tuple[float, str]:
    """A sort key that puts lag 4 before lag 16."""
    digits = "".join(itertools.takewhile(str.isdigit, text.lstrip("≤ ")))
    return (float(digits) if digits else math.inf, text)


def _run(
    run: RunRecord,
    name: str,
    keys: Sequence[str],
    *,
    by_run: bool,
    metrics: Iterable[str],
    limit: int,
) -> Json:
    lag_keys = ("rollout.lag.exact", "rollout.lag.bounded")
    own = [key for key in keys if key not in lag_keys and not key.startswith("estimator.")]
    method = ", ".join([run.method, *(f"{key} {plain(run.settings.get(key))}" for key in own)])
    accuracy = run.values(ACCURACY)
    return {
        "name": name,
        "key": name if by_run else method,
        "method": method,
        "lag": run.lag,
        "seed": run.seed,
        "cap": run.cap,
        "group_size": run.group_size,
        "step": run.step,
        "steps": run.steps,
        "finished": run.finished,
        "settings": {key: plain(run.settings.get(key)) for key in run.settings},
        "choices": {key: plain(run.settings.get(key)) for key in keys},
        "versions": run.versions,
        "signs": [sign.text for sign in bad_signs(run)],
        "refused": _refused(run),
        "start": accuracy[0] if accuracy else None,
        "final": accuracy[-1] if accuracy else None,
        "collapsed": run.collapsed,
        "retained": run.mean("ratio/retained_mass"),
        "spread": run.mean("ratio/log_ratio_sd"),
        "hours": _columns(thinned(hours(run), limit)),
        "series": {
            metric: _columns(thinned(run.series[metric], limit))
            for metric in metrics
            if metric in run.series
        },
    }


def hours(run: RunRecord) -> Points:
    """Hours since the start at which each step was done: sums of step and checkpoint times."""
    checkpoint = dict(run.series.get("time/checkpoint_s", []))
    done, points = 0.0, [(0, 0.0)]
    for step, seconds in run.series.get("time/step_s", []):
        # The checkpoint of a step is written after the step is recorded.
        done += seconds
        points.append((step, done / 3600))
        done += checkpoint.get(step, 0.0)
    return points


def _columns(points: Points) -> list[list[object]]:
    """Steps and values apart, which is half the text; what JSON has no word for as text."""
    return [
        [step for step, _ in points],
        [float(f"{v:.6g}") if math.isfinite(v) else str(v) for _, v in points],
    ]


def _metrics(charts: Sequence[Chart]) -> list[str]:
    wanted = itertools.chain.from_iterable(chart.fields for chart in charts)
    return list(dict.fromkeys([*wanted, "time/step_s"]))


def _choices(runs: Sequence[RunRecord], key: str) -> list[str]:
    return sorted({plain(run.settings.get(key)) for run in runs}, key=natural)


def _refused(run: RunRecord) -> Mapping[str, float]:
    prefix = "rollout/refused/"
    return {
        name.removeprefix(prefix): math.fsum(run.values(name))
        for name in sorted(run.series)
        if name.startswith(prefix)
    }


def _present(value: float | None) -> list[float]:
    return [] if value is None else [value]
