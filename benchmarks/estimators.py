"""How long weights take, against one `torch.exp` over the same trajectories.

`python benchmarks/estimators.py` prints a table; `--json FILE` writes it, `--check` exits with 1
and names the bounds that were missed. One million trajectories in groups of eight, one thread;
everything runs in turns in one process, and a ratio is the median over the turns of a method's
time to the exponential's in the same turn, so that a busy machine slows both sides. Finding out
how the groups lie is done once for a record, whatever is then asked of it, and has its own row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from megatron_gmc.estimators import ESTIMATORS, GMC, TrajectoryEstimator, TrajectoryRatios
from megatron_gmc.estimators.groups import Groups

TRAJECTORIES = 1_000_000
GROUPS = 125_000
BOUNDS = {"gmc": 3.0}
"""Largest time allowed, in units of the exponential's."""


@dataclass(frozen=True)
class Row:
    """One method's time."""

    method: str
    layout: str
    milliseconds: float
    exponentials: float
    """Its time over that of the exponential, the median over turns."""
    bound: float | None

    @property
    def missed(self) -> bool:
        return self.bound is not None and self.exponentials > self.bound


def record(trajectories: int, groups: int, *, shuffled: bool) -> TrajectoryRatios:
    """Log-normal ratios with sd(ℓ) = 1, of groups in a row or in any order."""
    generator = torch.Generator().manual_seed(0)
    group_N = torch.arange(groups).repeat_interleave(trajectories // groups)
    if shuffled:
        group_N = group_N[torch.randperm(trajectories, generator=generator)]
    log_ratio_N = torch.randn(trajectories, generator=generator, dtype=torch.float64) - 0.5
    return TrajectoryRatios(
        log_ratio_N,
        group_N,
        advantage_N=torch.randn(trajectories, generator=generator),
        tokens_N=torch.full((trajectories,), 100),
        groups=groups,
        behaviour_log_prob_N=-10 * torch.rand(trajectories, generator=generator).double(),
    )


def measure(trajectories: int, groups: int, repeats: int) -> list[Row]:
    """Times of every method that looks at more than one trajectory, and of gmc out of order."""
    methods: dict[str, TrajectoryEstimator] = {}
    for name, method in ESTIMATORS.items():
        estimator = method()
        if isinstance(estimator, TrajectoryEstimator) and estimator.scope != "trajectory":
            methods[name] = estimator
    methods["gmc, member limit"] = GMC(member_limit="G^0.33")
    in_rows = record(trajectories, groups, shuffled=False)
    in_any_order = record(trajectories, groups, shuffled=True)
    jobs: dict[tuple[str, str], Callable[[], object]] = {
        ("exp", "in rows"): in_rows.log_ratio_N.exp,
        ("layout", "in rows"): lambda: Groups.of(in_rows.group_N, groups),
    }
    for name, estimator in methods.items():
        jobs[name, "in rows"] = partial(estimator.weights, in_rows)
    jobs["gmc", "any order"] = partial(methods["gmc"].weights, in_any_order)
    times = _times(jobs, repeats)
    unit = times.pop(("exp", "in rows"))
    return [
        Row(
            name,
            layout,
            1e3 * statistics.median(seconds),
            statistics.median(a / b for a, b in zip(seconds, unit, strict=True)),
            BOUNDS.get(name) if layout == "in rows" else None,
        )
        for (name, layout), seconds in times.items()
    ]


def _times(
    jobs: dict[tuple[str, str], Callable[[], object]], repeats: int
) -> dict[tuple[str, str], list[float]]:
    """Seconds of each job, one for each turn; a first turn warms up."""
    seconds: dict[tuple[str, str], list[float]] = {job: [] for job in jobs}
    for repeat in range(repeats + 1):
        for job, run in jobs.items():
            start = time.perf_counter()
            run()
            if repeat > 0:
                seconds[job].append(time.perf_counter() - start)
    return seconds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--trajectories", type=int, default=TRAJECTORIES)
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args(arguments)
    if options.groups < 1 or options.trajectories % options.groups or options.repeats < 1:
        parser.error("--trajectories must be a multiple of --groups, and --repeats at least 1")
    torch.set_num_threads(1)
    rows = measure(options.trajectories, options.groups, options.repeats)
    print(f"{options.trajectories:,} trajectories in {options.groups:,} groups, float64, 1 thread")
    print(f"{'method':20} {'groups':10} {'ms':>8} {'× exp':>7} {'bound':>6}")
    for row in rows:
        bound = "" if row.bound is None else f"{row.bound:.1f}"
        print(
            f"{row.method:20} {row.layout:10} {row.milliseconds:8.2f} {row.exponentials:7.2f} "
            f"{bound:>6}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    missed = [row for row in rows if row.missed]
    for row in missed:
        print(f"missed: {row.method} takes {row.exponentials:.2f} × exp, bound {row.bound}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
