"""The scheduler's guarantees, under an event simulation that knows nothing of its formulas."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, Lag, LagScheduler

NONE = -1


@dataclass
class Consumed:
    submission: int
    oldest: int
    newest: int
    duration: float


@dataclass
class Server:
    held: int = NONE
    asked: int = NONE
    running: int = 0


@dataclass
class Settings:
    """One random cluster: how long things take and what goes wrong."""

    lag: Lag
    groups_per_step: int
    steps: int
    servers: int
    slots: int
    seed: int
    failure_rate: float = 0.0
    restart_rate: float = 0.0
    load_time: float = 1.0
    learn_time: float = 1.0
    alpha: float = 1.2
    capped: bool = True


@dataclass
class Simulation:
    """Learner, engines and driver as events on a heap; every wait ends in an event or is a bug."""

    settings: Settings
    consumed: list[list[Consumed]] = field(default_factory=list)
    submitted: dict[int, float] = field(default_factory=dict)
    longest_queue: int = 0
    restarts: int = 0

    def __post_init__(self) -> None:
        one = self.settings
        self.random = random.Random(one.seed)
        self.scheduler = LagScheduler(
            one.lag, one.groups_per_step, one.steps if one.capped else None
        )
        self.begin(0, {})

    def begin(self, version: int, finished: dict[int, Consumed]) -> None:
        """Start the program at `version` with what a checkpoint held; engines are empty."""
        one = self.settings
        self.now, self.ties = 0.0, 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.servers = [Server() for _ in range(one.servers)]
        self.finished = dict(finished)
        self.sent = set(finished)
        self.version = self.newest = version
        self.learning = False
        self.saved: tuple[int, dict[int, Consumed]] = (version, dict(finished))
        del self.consumed[version:]

    def run(self) -> list[list[Consumed]]:
        self.advance()
        while len(self.consumed) < self.settings.steps:
            assert self.events, "deadlock: nothing runs and the learner waits"
            self.now, _, event = heapq.heappop(self.events)
            event()
            if self.random.random() < self.settings.restart_rate and self.restarts < 5:
                self.restarts += 1
                self.begin(*self.saved)
            self.advance()
        return self.consumed

    def after(self, delay: float, event: Callable[[], None]) -> None:
        self.ties += 1
        heapq.heappush(self.events, (self.now + delay, self.ties, event))

    def complete(self) -> int:
        count = self.version * self.settings.groups_per_step
        while count in self.finished:
            count += 1
        return count

    def first_unsent(self) -> int:
        number = self.version * self.settings.groups_per_step
        while number in self.sent:
            number += 1
        return number

    def advance(self) -> None:
        for server in self.servers:
            version = self.scheduler.next_version(self.first_unsent(), self.newest)
            if server.asked == server.held < version and self.scheduler.may_switch(
                version, self.complete()
            ):
                server.asked = version
                delay = self.random.random() * self.settings.load_time
                self.after(delay, partial(setattr, server, "held", version))
        self.submit()
        first = self.version * self.settings.groups_per_step
        self.longest_queue = max(self.longest_queue, sum(number >= first for number in self.sent))
        self.learn()

    def submit(self) -> None:
        while True:
            number = self.first_unsent()
            able = [
                server
                for server in self.servers
                if server.running < self.settings.slots
                and self.scheduler.may_submit(number, server.held)
            ]
            if not able:
                return
            server = self.random.choice(able)
            server.running += 1
            self.sent.add(number)
            self.sample(server, number)

    def sample(self, server: Server, number: int) -> None:
        oldest = server.held
        duration = self.random.paretovariate(self.settings.alpha)
        self.submitted[number] = duration

        def end() -> None:
            if self.random.random() < self.settings.failure_rate:
                self.sample(server, number)
                return
            server.running -= 1
            # `asked`: an engine may use new weights before anybody hears of it.
            self.finished[number] = Consumed(number, oldest, server.asked, duration)

        self.after(duration, end)

    def learn(self) -> None:
        step, per_step = self.version, self.settings.groups_per_step
        wanted = [step * per_step + place for place in range(per_step)]
        if self.learning or any(number not in self.finished for number in wanted):
            return
        assert list(self.scheduler.consumed_by(step)) == wanted
        self.learning = True
        self.consumed.append([self.finished[number] for number in wanted])

        def end() -> None:
            for number in wanted:
                del self.finished[number]
            self.version, self.learning, self.newest = step + 1, False, step + 1
            self.save()

        self.after(self.random.random() * self.settings.learn_time, end)

    def save(self) -> None:
        """Checkpoint whenever the state may be kept, as a driver that waits for it would."""
        if self.complete() >= self.scheduler.complete_before(self.version):
            self.saved = (self.version, dict(self.finished))


def check(simulation: Simulation) -> None:
    """The guarantees, from what each group carries; no formula of the scheduler is used."""
    one = simulation.settings
    batches = simulation.run()
    flat = [group for batch in batches for group in batch]
    assert [group.submission for group in flat] == list(range(one.steps * one.groups_per_step))
    for step, batch in enumerate(batches):
        for group in batch:
            if isinstance(one.lag, ExactLag):
                assert group.oldest == group.newest == max(0, step - one.lag.k)
            else:
                assert 0 <= step - group.oldest <= one.lag.k
    assert simulation.longest_queue <= (one.lag.k + 1) * one.groups_per_step


lags = st.builds(ExactLag, st.integers(0, 5)) | st.builds(BoundedLag, st.integers(0, 5))
clusters = st.builds(
    Settings,
    lag=lags,
    groups_per_step=st.integers(1, 5),
    steps=st.integers(1, 9),
    servers=st.integers(1, 3),
    slots=st.integers(1, 8),
    seed=st.integers(0, 2**32),
    failure_rate=st.sampled_from([0.0, 0.3]),
    restart_rate=st.sampled_from([0.0, 0.05]),
    load_time=st.sampled_from([0.0, 1.0, 50.0]),
    learn_time=st.sampled_from([0.0, 1.0, 50.0]),
    alpha=st.sampled_from([0.8, 1.2, 3.0]),
    capped=st.booleans(),
)


@given(clusters)
@settings(max_examples=300, deadline=None)
def test_guarantees_hold_on_any_cluster(one: Settings) -> None:
    """L1 to L3, L5: bound, order, queue, no deadlock, nothing discarded, across restarts."""
    check(Simulation(one))


@pytest.mark.parametrize("k", [0, 1])
def test_exact_lag_0_and_1(k: int) -> None:
    """L1: step t's tokens carry version t; version max(0, t − 1)."""
    batches = Simulation(Settings(ExactLag(k), 3, 12, servers=2, slots=4, seed=1)).run()
    seen = [{(group.oldest, group.newest) for group in batch} for batch in batches]
    assert seen == [{(max(0, step - k),) * 2} for step in range(12)]


def test_heavy_tails_are_neither_dropped_nor_late() -> None:
    """L2: bounded lag 2, Pareto α = 1.2, 1,000 groups: what is consumed is what was submitted."""
    simulation = Simulation(
        Settings(BoundedLag(2), 10, 100, servers=2, slots=64, seed=5, learn_time=3.0)
    )
    check(simulation)
    consumed = {
        group.submission: group.duration for batch in simulation.consumed for group in batch
    }
    assert consumed == simulation.submitted
    assert len(consumed) == 1000
    # The tail is there, and it really made engines fall behind the learner.
    assert max(consumed.values()) > 50
    lags = {
        step - group.oldest for step, batch in enumerate(simulation.consumed) for group in batch
    }
    assert lags == {0, 1, 2}


@pytest.mark.parametrize("lag", [ExactLag(2), BoundedLag(2)], ids=str)
@pytest.mark.parametrize("version", [0, 7])
def test_restart_begins_inside_the_bound_and_does_not_wait(lag: Lag, version: int) -> None:
    """L3: from a checkpoint of version v with empty engines the next steps run and hold."""
    per_step = 2
    one = Settings(lag, per_step, version + 6, servers=1, slots=2, seed=2)
    simulation = Simulation(one)
    scheduler = simulation.scheduler
    finished = {
        number: Consumed(number, max(0, number // per_step - 2), max(0, number // per_step - 2), 1)
        for number in range(version * per_step, scheduler.complete_before(version))
    }
    simulation.consumed = [[] for _ in range(version)]
    simulation.begin(version, finished)
    for step, batch in list(enumerate(simulation.run()))[version:]:
        assert [group.submission for group in batch] == [2 * step, 2 * step + 1]
        assert all(step - group.oldest <= 2 for group in batch)


def test_an_engine_that_loads_late_bounds_the_pace() -> None:
    """L5: admission goes by the version that the engine holds, not by the learner's."""
    scheduler = LagScheduler(BoundedLag(1), groups_per_step=4)
    assert scheduler.may_submit(7, held=0)
    assert not scheduler.may_submit(8, held=0)
    assert scheduler.may_submit(8, held=1)


def test_nothing_is_sent_to_an_engine_without_weights() -> None:
    for lag in (ExactLag(3), BoundedLag(3)):
        assert not LagScheduler(lag, groups_per_step=1).may_submit(0, held=-1)


def test_exact_mode_names_the_version_and_bounded_mode_does_not() -> None:
    exact = LagScheduler(ExactLag(2), groups_per_step=3)
    assert [exact.required_version(n) for n in (0, 8, 9, 11, 12)] == [0, 0, 1, 1, 2]
    assert LagScheduler(BoundedLag(2), groups_per_step=3).required_version(9) is None


def test_exact_mode_refuses_newer_weights_too() -> None:
    """L1: an engine that is ahead may not sample for a step that wants older weights."""
    scheduler = LagScheduler(ExactLag(2), groups_per_step=3)
    assert [scheduler.may_submit(9, held) for held in (0, 1, 2)] == [False, True, False]
    assert scheduler.keeps_lag(9, oldest=1, newest=1)
    assert not scheduler.keeps_lag(9, oldest=1, newest=2)
    assert not scheduler.keeps_lag(9, oldest=2, newest=2)


def test_exact_mode_switches_only_after_the_old_version_is_done_with() -> None:
    scheduler = LagScheduler(ExactLag(2), groups_per_step=3)
    assert not scheduler.may_switch(1, complete=8)
    assert scheduler.may_switch(1, complete=9)
    assert LagScheduler(BoundedLag(2), groups_per_step=3).may_switch(1, complete=0)


def test_the_end_of_the_run_ends_submission_and_frees_the_last_versions() -> None:
    scheduler = LagScheduler(ExactLag(4), groups_per_step=2, steps=3)
    assert scheduler.may_submit(5, held=0)
    assert not scheduler.may_submit(6, held=0)
    assert scheduler.next_version(6, newest=3) == 3
    assert scheduler.may_switch(3, complete=6)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="lag k must be 0 or above, got -1"):
        ExactLag(-1)
    with pytest.raises(ValueError, match="lag k must be 0 or above, got -2"):
        BoundedLag(-2)
    with pytest.raises(ValueError, match="groups_per_step must be 1 or above, got 0"):
        LagScheduler(ExactLag(0), 0)
    with pytest.raises(ValueError, match="steps must be 0 or above, got -1"):
        LagScheduler(ExactLag(0), 1, steps=-1)


def test_lag_is_named_with_its_kind() -> None:
    assert str(ExactLag(16)) == "lag 16 (exact)"
    assert str(BoundedLag(16)) == "lag ≤ 16 (bounded)"
