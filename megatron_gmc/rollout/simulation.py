"""A run as events on a heap, on the scheduler and the ledger that real runs have.

The model. An engine works on `concurrency` responses at a time, in the order in which it got them,
and each grows at tokens_per_s / concurrency, so a response of T tokens takes T · concurrency /
tokens_per_s seconds; decoding is bound by memory, and one response is not faster alone. An engine
that loads weights stands still. The learner takes its batch as soon as it may, learns, hands the
weights over, and looks for the next. Grading takes no time, prompts are processed in no time.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from megatron_gmc.rollout.ledger import Ledger
from megatron_gmc.rollout.scheduler import LagScheduler

Lengths = Callable[[int], Sequence[int]]
"""Tokens of each response of a submission's group."""


@dataclass(frozen=True)
class Cluster:
    """Engines and learner, and how long they take.

    tokens_per_s: of one engine with `concurrency` responses under way; calls_per_engine: groups
    that an engine has at a time, the others wait until one is free; learn_s: one optimizer step;
    publish_s: the learner hands weights over, once a batch; load_s: an engine takes them.
    """

    engines: int
    concurrency: int
    tokens_per_s: float
    calls_per_engine: int
    learn_s: float
    publish_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True)
class Figures:
    """What the steps of the measured window did.

    learner_idle: share of time in which the learner waited for a batch; engine_idle: share in
    which an engine had no response under way, mean over engines; slot_idle: share of unused places
    for responses. lags: share of trajectories by the lag of their oldest token.
    consumed_length_ratio: mean tokens of what was consumed over what was sampled, in the window.
    """

    steps_per_hour: float
    tokens_per_s: float
    learner_idle: float
    engine_idle: float
    slot_idle: float
    lags: dict[int, float]
    consumed_length_ratio: float

    @property
    def mean_lag(self) -> float:
        return sum(lag * share for lag, share in self.lags.items())


@dataclass
class _Group:
    """A submission under way: responses not finished, oldest version, tokens, learner version."""

    number: int
    left: int
    tokens: int
    versions: list[int] = field(default_factory=list)


@dataclass
class _Engine:
    """`work` is the engine's own clock, which stands still while it loads."""

    held: int = -1
    asked: int = -1
    open: int = 0
    waiting: deque[tuple[_Group, int]] = field(default_factory=deque)
    running: list[tuple[float, int, _Group]] = field(default_factory=list)
    paused: float = 0.0
    loading: bool = False
    plan: int = 0
    seen: float = 0.0
    idle_s: float = 0.0
    slot_s: float = 0.0

    def account(self, now: float) -> None:
        """Book the time up to now, before anything changes."""
        busy = 0 if self.loading else len(self.running)
        self.slot_s += busy * (now - self.seen)
        if busy == 0:
            self.idle_s += now - self.seen
        self.seen = now


class Simulation:
    """One run on one cluster; `run` takes it through some steps."""

    def __init__(self, cluster: Cluster, scheduler: LagScheduler, lengths: Lengths) -> None:
        self._cluster = cluster
        self._scheduler = scheduler
        self._lengths = lengths
        self._ledger: Ledger[_Group] = Ledger(scheduler)
        self._engines = [_Engine() for _ in range(cluster.engines)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = 0
        self._now = 0.0
        self._newest = 0
        self._waits_since: float | None = 0.0
        self._wait_s = 0.0
        self._lags: Counter[int] = Counter()
        self._consumed: list[int] = []
        self._sampled: list[int] = []

    def run(self, steps: int) -> Figures:
        """Simulate until a steady course is likely, and then `steps` more, which count.

        Left out are the first steps, as many as the largest lag and two batches. The window goes
        from the start of one batch to that of another; `steps` is rounded up to whole batches.
        """
        size = self._scheduler.steps_per_batch
        first = -(-(self._scheduler.lag.largest + 2 * size) // size) * size
        self._run_until(first)
        begin = self._now
        for engine in self._engines:
            engine.account(begin)
            engine.idle_s = engine.slot_s = 0.0
        self._wait_s = 0.0
        self._lags.clear()
        self._consumed.clear()
        self._sampled.clear()
        last = first + -(-steps // size) * size
        self._run_until(last)
        return self._figures(last - first, self._now - begin)

    def _run_until(self, step: int) -> None:
        """Go on until the batch at `step` is there."""
        while self._ledger.version < step or not self._ledger.batch_given:
            self._advance()
            if self._ledger.version >= step and self._ledger.batch_given:
                return
            self._now = self._events[0][0]
            # What happens at one moment is all known before anything is decided.
            while self._events and self._events[0][0] == self._now:
                heapq.heappop(self._events)[2]()

    def _figures(self, steps: int, elapsed: float) -> Figures:
        for engine in self._engines:
            engine.account(self._now)
        total = sum(self._lags.values())
        engine_s = elapsed * len(self._engines)
        slots = engine_s * self._cluster.concurrency
        return Figures(
            steps_per_hour=3600 * steps / elapsed,
            tokens_per_s=sum(self._consumed) / elapsed,
            learner_idle=self._wait_s / elapsed,
            engine_idle=sum(engine.idle_s for engine in self._engines) / engine_s,
            slot_idle=1 - sum(engine.slot_s for engine in self._engines) / slots,
            lags={lag: self._lags[lag] / total for lag in sorted(self._lags)},
            consumed_length_ratio=(sum(self._consumed) / len(self._consumed))
            / (sum(self._sampled) / len(self._sampled)),
        )

    # -- decisions, in the driver's order ---------------------------------------------------------

    def _advance(self) -> None:
        for engine in self._engines:
            version = self._scheduler.next_version(self._ledger.first_unsent(), self._newest)
            due = engine.asked == engine.held < version
            if due and self._scheduler.may_switch(version, self._ledger.complete):
                self._load(engine, version)
        self._send()
        if self._waits_since is not None and not self._ledger.batch_given:
            batch = self._ledger.batch()
            if batch is not None:
                self._learn(batch)

    def _send(self) -> None:
        while True:
            number = self._ledger.first_unsent()
            able = [
                one
                for one in self._engines
                if one.open < self._cluster.calls_per_engine
                and self._ledger.may_send(number, one.held)
            ]
            if not able:
                return
            engine = min(able, key=lambda one: one.open)
            self._ledger.send(number + 1, engine.held)
            tokens = self._lengths(number)
            group = _Group(number, len(tokens), sum(tokens))
            engine.open += 1
            engine.waiting.extend((group, length) for length in tokens)
            self._fill(engine)

    def _after(self, delay: float, event: Callable[[], None]) -> None:
        self._ties += 1
        heapq.heappush(self._events, (self._now + delay, self._ties, event))

    # -- the learner ------------------------------------------------------------------------------

    def _learn(self, batch: Sequence[Sequence[int]]) -> None:
        assert self._waits_since is not None
        self._wait_s += self._now - self._waits_since
        self._waits_since = None
        for step, numbers in enumerate(batch, self._ledger.version):
            for number in numbers:
                group = self._ledger.finished[number]
                self._lags.update(step - version for version in group.versions)
                self._consumed.append(group.tokens)
        cluster = self._cluster
        self._after(len(batch) * cluster.learn_s + cluster.publish_s, self._publish)

    def _publish(self) -> None:
        self._ledger.advance()
        self._newest = self._ledger.version
        self._waits_since = self._now

    # -- an engine --------------------------------------------------------------------------------

    def _fill(self, engine: _Engine) -> None:
        """Begin waiting responses while there is room, and plan the next event."""
        if engine.loading:
            return
        engine.account(self._now)
        work = self._now - engine.paused
        seconds = self._cluster.concurrency / self._cluster.tokens_per_s
        while engine.waiting and len(engine.running) < self._cluster.concurrency:
            group, tokens = engine.waiting.popleft()
            group.versions.append(engine.held)
            self._ties += 1
            heapq.heappush(engine.running, (work + tokens * seconds, self._ties, group))
        engine.plan += 1
        if engine.running:
            delay = max(0.0, engine.running[0][0] - work)
            self._after(delay, partial(self._finish, engine, engine.plan))

    def _finish(self, engine: _Engine, plan: int) -> None:
        if plan != engine.plan:
            return  # The engine began something shorter, or loads.
        engine.account(self._now)
        _, _, group = heapq.heappop(engine.running)
        group.left -= 1
        if group.left == 0:
            engine.open -= 1
            self._sampled.append(group.tokens)
            self._ledger.finish(group.number, min(group.versions), group)
        self._fill(engine)

    def _load(self, engine: _Engine, version: int) -> None:
        engine.account(self._now)
        engine.asked = version
        engine.loading = True
        engine.plan += 1

        def loaded() -> None:
            engine.account(self._now)
            engine.loading = False
            engine.held = version
            engine.paused += self._cluster.load_s
            self._fill(engine)

        self._after(self._cluster.load_s, loaded)
