"""Simulated runs against measured ones: the real driver, with engines whose durations are known.

`python benchmarks/simulate_check.py` prints a table; `--json FILE` writes it, `--check` exits with
1 where steps per hour differ by more than 15 %. The engines sleep instead of computing, in the
event loop of the real driver, and stand still while they load weights; the learner sleeps too. So
the two sides share scheduler and ledger, and what is compared is the simulator's picture of
driver, engines and learner, in real time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron_gmc.rollout.driver import RolloutDriver
from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, Lag, LagScheduler
from megatron_gmc.rollout.simulation import Cluster, Lengths, Simulation
from megatron_gmc.rollout.types import Prompt, Refusal, Sample, SampleRequest, SamplingParams

BOUND = 0.15
"""Largest relative difference of steps per hour."""
PROMPTS, GROUP = 4, 4
CLUSTER = Cluster(
    engines=2,
    concurrency=8,
    tokens_per_s=1600,
    calls_per_engine=4,
    learn_s=0.2,
    publish_s=0.025,
    load_s=0.05,
)


@dataclass(frozen=True)
class Row:
    lengths: str
    lag: str
    simulated: float
    measured: float
    """Steps per hour, the median over the repeats."""
    simulated_lag: float
    measured_lag: float
    simulated_idle: float
    measured_idle: float
    """Share of time in which the learner waited."""

    @property
    def difference(self) -> float:
        return abs(self.simulated / self.measured - 1)


def constant(submission: int) -> list[int]:
    return [60] * GROUP


def log_normal(submission: int) -> list[int]:
    random = np.random.default_rng([1, submission])
    return [max(1, round(one)) for one in 50 * np.exp(0.6 * random.standard_normal(GROUP))]


def pareto(submission: int) -> list[int]:
    random = np.random.default_rng([2, submission])
    return [min(400, round(one)) for one in 20 * (1 + random.pareto(1.2, GROUP))]


class SleepingEngine:
    """Works on `concurrency` responses at a time, in order; each token takes its time, exactly."""

    def __init__(self, name: str, cluster: Cluster, lengths: Lengths) -> None:
        self.name = name
        self._cluster = cluster
        self._lengths = lengths
        self._held = -1
        self._places = asyncio.Semaphore(cluster.concurrency)
        self._running = asyncio.Event()
        self._running.set()
        self._stood = 0.0

    async def start(self) -> None:
        pass

    async def version(self) -> int:
        return self._held

    async def update_weights(self, folder: Path, version: int) -> None:
        self._running.clear()
        began = time.monotonic()
        await asyncio.sleep(self._cluster.load_s)
        self._stood += time.monotonic() - began
        self._held = version
        self._running.set()

    async def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> list[list[Sample | Refusal]]:
        return list(await asyncio.gather(*(self._group(one.group_id) for one in requests)))

    async def close(self) -> None:
        pass

    async def _group(self, number: int) -> list[Sample | Refusal]:
        return list(await asyncio.gather(*map(self._respond, self._lengths(number))))

    async def _respond(self, tokens: int) -> Sample:
        async with self._places:
            await self._running.wait()
            versions, began, stood = [self._held], time.monotonic(), self._stood
            seconds = tokens * self._cluster.concurrency / self._cluster.tokens_per_s
            while (left := seconds - (time.monotonic() - began - self._stood + stood)) > 0:
                await asyncio.sleep(left)
                await self._running.wait()
            versions.append(self._held)
        return Sample(
            tokens=np.zeros(tokens, dtype=np.int64),
            log_probs=np.zeros(tokens, dtype=np.float32),
            # When inside a load changed them does not matter here: the oldest one counts.
            versions=np.linspace(*versions, tokens).round().astype(np.int64),
            finish_reason="stop",
        )


def measure(
    scheduler: LagScheduler, lengths: Lengths, steps: int, cluster: Cluster = CLUSTER
) -> tuple[float, float, float]:
    """Steps per hour, mean lag and the learner's idle share of a run of the real driver."""
    driver = RolloutDriver(
        engines=[SleepingEngine(f"engine {n}", cluster, lengths) for n in range(cluster.engines)],
        scheduler=scheduler,
        prompt_at=lambda number: Prompt(str(number), "", (1,), ""),
        grade=lambda jobs: [0.0] * len(jobs),
        decode=lambda tokens: "",
        params=SamplingParams(1.0, 10**6, (0,)),
        group_size=GROUP,
        vocabulary=10,
        seed=0,
        prompt_fingerprint="",
        request_groups=1,
        calls_per_engine=cluster.calls_per_engine,
    )
    size = scheduler.steps_per_batch
    first = scheduler.lag.largest + 2 * size
    lags: Counter[int] = Counter()
    idle = began = 0.0
    try:
        driver.start()
        driver.publish(0, Path("weights"))
        for start in range(0, first + steps + size, size):
            asked = time.monotonic()
            for step in range(start, start + size):
                groups = driver.next_batch(step)
                if start > first:
                    lags.update(step - one.oldest_version for g in groups for one in g.trajectories)
            now = time.monotonic()
            idle += now - asked
            if start <= first:
                began, idle = now, 0.0
            if start >= first + steps:
                break
            time.sleep(size * cluster.learn_s + cluster.publish_s)
            driver.publish(start + size, Path("weights"))
    finally:
        driver.close()
    elapsed = now - began
    mean_lag = sum(lag * count for lag, count in lags.items()) / lags.total()
    return 3600 * steps / elapsed, mean_lag, idle / elapsed


IN_ORDER, OVERTAKING = BoundedLag(3), BoundedLag(3, order="earliest_deadline")
CASES: tuple[tuple[Lengths, tuple[Lag, ...]], ...] = (
    (constant, (BoundedLag(0), BoundedLag(1))),
    (log_normal, (BoundedLag(0), BoundedLag(1), IN_ORDER, OVERTAKING, ExactLag(2))),
    (pareto, (IN_ORDER, OVERTAKING)),
)


def rows(steps: int, repeats: int) -> list[Row]:
    table = []
    for lengths, lags in CASES:
        for lag in lags:
            scheduler = LagScheduler(lag, PROMPTS)
            figures = Simulation(CLUSTER, scheduler, lengths).run(steps)
            runs = [measure(scheduler, lengths, steps) for _ in range(repeats)]
            hourly, mean_lag, idle = (
                statistics.median(column) for column in zip(*runs, strict=True)
            )
            table.append(
                Row(
                    lengths.__name__,
                    str(lag),
                    figures.steps_per_hour,
                    hourly,
                    figures.mean_lag,
                    mean_lag,
                    figures.learner_idle,
                    idle,
                )
            )
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where the bound is missed"
    )
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.repeats < 1:
        parser.error("--steps and --repeats must be at least 1")
    table = rows(options.steps, options.repeats)
    print(f"{'':10} {'':36} {'steps/hour':>17} {'':6} {'mean lag':>11} {'learner idle':>13}")
    print(f"{'lengths':10} {'lag':36} {'simulated':>9} {'real':>7} {'diff':>6} "
          f"{'sim.':>5} {'real':>5} {'sim.':>6} {'real':>6}")  # fmt: skip
    for row in table:
        print(
            f"{row.lengths:10} {row.lag:36} {row.simulated:9.0f} {row.measured:7.0f} "
            f"{row.difference:6.1%} {row.simulated_lag:5.2f} {row.measured_lag:5.2f} "
            f"{row.simulated_idle:6.1%} {row.measured_idle:6.1%}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in table], indent=2) + "\n")
    missed = [row for row in table if row.difference > BOUND]
    for row in missed:
        print(f"missed: {row.lengths}, {row.lag}: {row.difference:.1%} apart, bound {BOUND:.0%}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
