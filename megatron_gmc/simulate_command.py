"""`simulate`: steps per hour, idle time and lag of a cluster that one only knows the numbers of."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pyarrow import ArrowException
from pyarrow.compute import list_value_length
from pyarrow.parquet import read_table
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_gmc.errors import ConfigError, OutputError
from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, Lag, LagScheduler, Order
from megatron_gmc.rollout.simulation import Cluster, Figures, Lengths, Simulation
from megatron_gmc.section import NonNegativeFloat, PositiveFloat, Section
from megatron_gmc.settings import load_config

Draw = Callable[[np.random.Generator, int], list[float]]
"""Some lengths, not yet rounded to tokens."""


class ConstantLengths(Section):
    type: Literal["constant"] = "constant"
    tokens: PositiveInt

    def source(self) -> Draw:
        return lambda random, count: [float(self.tokens)] * count


class LogNormalLengths(Section):
    type: Literal["log_normal"] = "log_normal"
    median: PositiveFloat
    sigma: PositiveFloat
    """Standard deviation of the logarithm."""

    def source(self) -> Draw:
        location = math.log(self.median)
        return lambda random, count: list(random.lognormal(location, self.sigma, count))


class ParetoLengths(Section):
    type: Literal["pareto"] = "pareto"
    smallest: PositiveFloat
    alpha: PositiveFloat
    """Tail exponent: the mean is infinite up to 1, the variance up to 2."""

    def source(self) -> Draw:
        return lambda random, count: list(self.smallest * (1 + random.pareto(self.alpha, count)))


class MeasuredLengths(Section):
    """A text file with one length a line, drawn from with replacement."""

    type: Literal["file"] = "file"
    path: Path

    def source(self) -> Draw:
        """Raises ConfigError where the file has no lengths or something else in it."""
        try:
            lengths = [float(line) for line in self.path.read_text(encoding="utf-8").split()]
        except OSError as error:
            raise ConfigError(f"lengths.path: cannot read {self.path}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"lengths.path: {self.path} is no list of numbers: {error}") from None
        if not lengths or not all(0 < length < math.inf for length in lengths):
            raise ConfigError(f"lengths.path: {self.path} must hold numbers above 0, one a line")
        return lambda random, count: list(random.choice(lengths, count))


class RecordedLengths(Section):
    """Responses of a run: a Parquet file with a list column `tokens`, or a folder of them."""

    type: Literal["record"] = "record"
    path: Path

    def source(self) -> Draw:
        """Raises ConfigError where no such file can be read, or it has no rows."""
        try:
            column = read_table(self.path, columns=["tokens"])["tokens"]
            lengths = list_value_length(column).drop_null().to_numpy()
        except (OSError, KeyError, ArrowException) as error:
            raise ConfigError(f"lengths.path: {self.path} has no column tokens: {error}") from None
        if len(lengths) == 0:
            raise ConfigError(f"lengths.path: {self.path} has no rows")
        return lambda random, count: list(random.choice(lengths, count))


class SimulateConfig(Section):
    """A cluster and a workload: `megatron-gmc simulate`."""

    engines: PositiveInt
    concurrency: PositiveInt
    """Responses that one engine works on at a time."""
    tokens_per_s: PositiveFloat
    """Of one engine with all of them under way."""
    calls_per_engine: PositiveInt | None = None
    """Groups that an engine has at a time; null for four times concurrency / group_size, so that
    an engine stays full while some groups wait for their last responses."""
    learn_s: PositiveFloat
    """Seconds of one optimizer step."""
    publish_s: NonNegativeFloat = 0.0
    """Seconds in which the learner hands weights over, once a batch."""
    load_s: NonNegativeFloat = 0.0
    """Seconds in which an engine takes weights and samples nothing."""
    lengths: Annotated[
        ConstantLengths | LogNormalLengths | ParetoLengths | MeasuredLengths | RecordedLengths,
        Field(discriminator="type"),
    ]
    """Tokens of a response."""
    longest: PositiveInt | None = None
    """Where responses are cut off."""
    prompts_per_step: PositiveInt
    """P."""
    group_size: PositiveInt
    """G."""
    mode: Literal["bounded", "exact"] = "bounded"
    order: Order = "submission"
    lags: tuple[NonNegativeInt, ...] = (0, 1, 2, 4, 8)
    """The k to compare."""
    steps_per_batch: PositiveInt = 1
    """S."""
    steps: PositiveInt = 200
    """Steps that count, after those that fill the pipeline."""
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _lags_can_be_kept(self) -> Self:
        if not self.lags:
            raise ValueError("lags: empty; give one k or more, as in [0, 1, 2]")
        if self.mode == "exact" and self.order != "submission":
            raise ValueError(f"order: {self.order} needs mode bounded")
        for k in self.lags:
            try:
                self.scheduler(k)
            except ValueError as error:
                raise ValueError(f"lags: {error}") from None
        return self

    def scheduler(self, k: int) -> LagScheduler:
        lag: Lag = ExactLag(k) if self.mode == "exact" else BoundedLag(k, order=self.order)
        return LagScheduler(lag, self.prompts_per_step, steps_per_batch=self.steps_per_batch)

    def cluster(self) -> Cluster:
        return Cluster(
            self.engines,
            self.concurrency,
            self.tokens_per_s,
            self.calls_per_engine or -(-4 * self.concurrency // self.group_size),
            self.learn_s,
            self.publish_s,
            self.load_s,
        )

    def length_source(self) -> Lengths:
        """Lengths that depend on seed and submission alone: each k sees the same ones."""
        draw = self.lengths.source()

        def lengths(submission: int) -> list[int]:
            drawn = draw(np.random.default_rng([self.seed, submission]), self.group_size)
            whole = (max(1, round(one)) for one in drawn)
            return [min(one, self.longest or one) for one in whole]

        return lengths


def simulate(path: Path | None, overrides: Sequence[str], *, target: Path | None) -> int:
    """Print one row for each k, and write the rows to `target` as JSON; returns the exit code."""
    config = load_config(SimulateConfig, path, overrides)
    rows = [(config.scheduler(k).lag, figures) for k, figures in simulated(config)]
    console = Console(highlight=False)
    console.print(_table(config, rows))
    if target is not None:
        record = [{"lag": str(lag), "k": lag.k, **asdict(figures)} for lag, figures in rows]
        try:
            target.write_text(json.dumps(record, indent=2) + "\n")
        except OSError as error:
            raise OutputError(f"cannot write {target}: {error.strerror}") from error
    return 0


def simulated(config: SimulateConfig) -> Iterator[tuple[int, Figures]]:
    """Each k of the config and what it gives."""
    for k in config.lags:
        run = Simulation(config.cluster(), config.scheduler(k), config.length_source())
        yield k, run.run(config.steps)


def _table(config: SimulateConfig, rows: Sequence[tuple[Lag, Figures]]) -> Table:
    table = Table(
        title=(
            f"{config.mode} lag, order {config.order}: {config.engines} engines, "
            f"P = {config.prompts_per_step}, G = {config.group_size}, S = {config.steps_per_batch}"
        ),
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("lag", no_wrap=True)
    # "idle": nothing at all under way; "places": for responses, idle also in an engine half full.
    columns = "steps/h", "tokens/s", "learner idle", "engines idle", "places idle"
    for column in (*columns, "mean lag", "max lag", "length ratio"):
        table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
    for lag, figures in rows:
        table.add_row(
            f"{'= ' if config.mode == 'exact' else '≤ '}{lag.k}",
            f"{figures.steps_per_hour:.1f}",
            f"{figures.tokens_per_s:,.0f}",
            f"{figures.learner_idle:.1%}",
            f"{figures.engine_idle:.1%}",
            f"{figures.slot_idle:.1%}",
            f"{figures.mean_lag:.2f}",
            str(max(figures.lags)),
            f"{figures.consumed_length_ratio:.3f}",
        )
    return table
