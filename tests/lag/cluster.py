"""A cluster as random events around the real scheduler and ledger; knows none of their formulas."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from megatron_gmc.rollout.ledger import Ledger
from megatron_gmc.rollout.scheduler import ExactLag, Lag, LagScheduler

NONE = -1


@dataclass
class Made:
    """A finished submission: the versions that may be in its tokens, and how long it took."""

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
    steps_per_batch: int = 1
    failure_rate: float = 0.0
    restart_rate: float = 0.0
    load_time: float = 1.0
    learn_time: float = 1.0
    alpha: float = 1.2
    capped: bool = True


@dataclass
class Saved:
    """What a checkpoint keeps of the rollout."""

    version: int
    submitted: int
    finished: dict[int, Made]
    ahead: set[int]


@dataclass
class Cluster:
    """Learner, engines and driver as events on a heap; every wait ends in an event or is a bug."""

    settings: Settings
    consumed: list[list[Made]] = field(default_factory=list)
    made: dict[int, Made] = field(default_factory=dict)
    longest_queue: int = 0
    restarts: int = 0

    def __post_init__(self) -> None:
        one = self.settings
        self.random = random.Random(one.seed)
        self.scheduler = LagScheduler(
            one.lag,
            one.groups_per_step,
            one.steps if one.capped else None,
            one.steps_per_batch,
        )
        self.begin(Saved(0, 0, {}, set()))

    def begin(self, saved: Saved) -> None:
        """Start the program with what a checkpoint held; engines are empty."""
        self.now, self.ties = 0.0, 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.servers = [Server() for _ in range(self.settings.servers)]
        finished = {number: (one.oldest, one) for number, one in saved.finished.items()}
        self.ledger: Ledger[Made] = Ledger(
            self.scheduler, saved.version, saved.submitted, finished, saved.ahead
        )
        self.newest = saved.version
        self.lost: list[int] = []
        self.learning = False
        self.saved = saved
        del self.consumed[saved.version :]

    def run(self) -> list[list[Made]]:
        self.advance()
        while len(self.consumed) < self.settings.steps or self.learning:
            assert self.events, "deadlock: nothing runs and the learner waits"
            self.now, _, event = heapq.heappop(self.events)
            event()
            if self.random.random() < self.settings.restart_rate and self.restarts < 5:
                self.restarts += 1
                self.begin(self.saved)
            self.advance()
        return self.consumed

    def after(self, delay: float, event: Callable[[], None]) -> None:
        self.ties += 1
        heapq.heappush(self.events, (self.now + delay, self.ties, event))

    def advance(self) -> None:
        for server in self.servers:
            version = self.scheduler.next_version(self.ledger.first_unsent(), self.newest)
            due = server.asked == server.held < version
            if due and self.scheduler.may_switch(version, self.ledger.complete):
                server.asked = version
                delay = self.random.random() * self.settings.load_time
                self.after(delay, partial(setattr, server, "held", version))
        self.submit()
        self.learn()

    def submit(self) -> None:
        while True:
            number = self.lost[0] if self.lost else self.ledger.first_unsent()
            able = [
                server
                for server in self.servers
                if server.running < self.settings.slots
                and self.ledger.may_send(number, server.held)
            ]
            if not able:
                return
            server = self.random.choice(able)
            if self.lost:
                self.lost.pop(0)
            else:
                assert self.ledger.send(number + 1, server.held) == [number]
            server.running += 1
            self.sample(server, number)
            self.longest_queue = max(
                self.longest_queue, self.ledger.unfinished + len(self.ledger.finished)
            )

    def sample(self, server: Server, number: int) -> None:
        oldest = server.held
        # Of the submission alone, so that two clusters differ by what their schedulers decide.
        duration = random.Random(f"{self.settings.seed}/{number}").paretovariate(
            self.settings.alpha
        )

        def end() -> None:
            server.running -= 1
            # `asked`: an engine may use new weights before anybody hears of it.
            one = Made(number, oldest, server.asked, duration)
            if self.random.random() < self.settings.failure_rate:
                self.lost.append(number)
            elif not self.ledger.keeps_lag(number, one.oldest, one.newest):
                raise AssertionError(f"refused {one}")
            else:
                self.made[number] = one
                self.ledger.finish(number, oldest, one)

        self.after(duration, end)

    def learn(self) -> None:
        if self.learning or len(self.consumed) >= self.settings.steps:
            return
        batch = self.ledger.batch()
        if batch is None:
            return
        assert len(batch) == self.settings.steps_per_batch
        self.learning = True
        self.consumed += [[self.ledger.finished[number] for number in step] for step in batch]

        def end() -> None:
            self.ledger.advance()
            self.learning, self.newest = False, self.ledger.version
            self.save()

        self.after(len(batch) * self.random.random() * self.settings.learn_time, end)

    def save(self) -> None:
        """Checkpoint whenever the state may be kept, as a driver that waits for it would."""
        ledger = self.ledger
        if ledger.complete >= self.scheduler.complete_before(ledger.version):
            self.saved = Saved(
                ledger.version, ledger.submitted, dict(ledger.finished), set(ledger.ahead)
            )


def lag_of(lag: Lag, step: int) -> int:
    """k(t), read off the setting."""
    return lag.first[step] if step < len(lag.first) else lag.k


def check(cluster: Cluster) -> None:
    """The guarantees, from what each group carries; no formula of the scheduler is used."""
    one = cluster.settings
    steps = cluster.run()
    flat = [made for step in steps for made in step]
    numbers = [made.submission for made in flat]
    everything = list(range(one.steps * one.groups_per_step))
    assert [len(step) for step in steps] == [one.groups_per_step] * one.steps
    assert len(set(numbers)) == len(numbers)
    if isinstance(one.lag, ExactLag) or one.lag.order == "submission":
        assert numbers == everything
    elif one.capped:
        assert sorted(numbers) == everything
    for step, taken in enumerate(steps):
        start = step // one.steps_per_batch * one.steps_per_batch
        for made in taken:
            if isinstance(one.lag, ExactLag):
                assert made.oldest == made.newest == max(0, start - lag_of(one.lag, start))
            else:
                assert 0 <= step - made.oldest <= lag_of(one.lag, step)
                assert made.newest <= start
    if cluster.restarts == 0:
        # What was sampled is what was consumed: no filter looked at how long it took.
        assert [cluster.made[number].duration for number in numbers] == [m.duration for m in flat]
    ahead = one.steps_per_batch if isinstance(one.lag, ExactLag) else 1
    largest = max(one.lag.k, *(0, *one.lag.first))
    assert cluster.longest_queue <= (largest + ahead) * one.groups_per_step
