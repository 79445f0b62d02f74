"""The event loop's half of the driver: starts whatever the scheduler allows, as soon as it may.

Everything here runs on the loop's thread. One task, the conductor, takes all decisions; every
event (a call answered, a group complete, weights published or acknowledged, a step consumed)
wakes it, and it starts tasks. A task that fails ends the run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_gmc.rollout.channel import NO_VERSION, EngineChannel, close_all
from megatron_gmc.rollout.engine import Engine, EngineError
from megatron_gmc.rollout.evaluation import EvaluationResult, PendingEvaluation
from megatron_gmc.rollout.fleet import Fleet, FleetDownError
from megatron_gmc.rollout.meter import Meter
from megatron_gmc.rollout.plan import RolloutPlan
from megatron_gmc.rollout.sampling import GroupSampler, Wanted
from megatron_gmc.rollout.staleness import Completed, staleness
from megatron_gmc.rollout.state import RolloutState, ledger_of
from megatron_gmc.rollout.types import Group, Prompt, Refusal, Sample, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Published:
    folder: Path
    released: concurrent.futures.Future[None]


class RolloutLoop:
    def __init__(
        self,
        plan: RolloutPlan,
        engines: Sequence[Engine],
        sampler: GroupSampler,
        meter: Meter,
        state: RolloutState | None,
    ) -> None:
        self._plan = plan
        self._scheduler = plan.scheduler
        self._sampler = sampler
        self._meter = meter
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels = [
            EngineChannel(engine, meter, plan.calls_per_engine, self._wake.set)
            for engine in engines
        ]
        self._fleet = Fleet(plan.fleet, self._channels, meter, self._wake.set)
        self.failure: EngineError | None = None
        self._ledger = ledger_of(state, plan.scheduler)
        self._newest = NO_VERSION
        self._published: dict[int, _Published] = {}
        self._evaluations: list[PendingEvaluation] = []
        self._evaluated = 0
        # Calls whose engine failed; another engine gets them.
        self._returned: list[Sequence[int]] = []

    # -- what the training loop asks for ------------------------------------------------------

    def start(self) -> None:
        for channel in self._channels:
            self._spawn(self._start(channel, channel.life), f"starting {channel.name}")
        self._spawn(self._conduct(), "conducting")
        self._spawn(self._watch(), "watching for stalled calls")
        self._spawn(self._fleet.watch(), "watching the fleet")

    async def batch(self, step: int) -> list[Group]:
        """The groups of `step`, once its whole batch is complete.

        They stay here until the learner shows that it is past the batch.
        """
        self.raise_failure()
        steps, ledger = self._scheduler.steps, self._ledger
        if steps is not None and step >= steps:
            raise ValueError(f"step {step} is past the end, the run has {steps} steps")
        self._move_to(self._scheduler.batch_start(step))
        end = ledger.version * self._scheduler.groups_per_step + self._scheduler.groups_per_batch
        oldest = self._scheduler.oldest_version(end - 1)
        if ledger.first_unsent() < end and oldest > self._newest:
            raise ValueError(
                f"step {step} waits for samples of version {oldest} or newer, which was not "
                f"published; publish version {ledger.version} first"
            )
        if not ledger.batch_given:
            await self._until(lambda: ledger.batch() is not None)
            self._meter.note(staleness(self._batch(), ledger.version, ledger.finished.values()))
            self._wake.set()
        return [completed.group for completed in self._batch()[step - ledger.version]]

    def publish(self, version: int, folder: Path) -> concurrent.futures.Future[None]:
        self.raise_failure()
        self._move_to(version)
        if self._newest not in (NO_VERSION, version - self._scheduler.steps_per_batch):
            raise ValueError(
                f"version {version} cannot be published after version {self._newest}; "
                "each version is published once, in order"
            )
        released: concurrent.futures.Future[None] = concurrent.futures.Future()
        released.set_running_or_notify_cancel()
        self._published[version] = _Published(folder, released)
        self._newest = version
        self._wake.set()
        return released

    def evaluate(
        self, prompts: Sequence[Prompt], version: int, count: int
    ) -> concurrent.futures.Future[EvaluationResult]:
        self.raise_failure()
        if not prompts or count < 1:
            raise ValueError(
                f"an evaluation needs a prompt and count ≥ 1, got {len(prompts)}, {count}"
            )
        # Held or being loaded by some engine, or kept for one; no engine passes it from now on.
        asked = [channel.asked for channel in self._channels]
        if version not in self._published and version not in asked:
            raise ValueError(
                f"version {version} cannot be evaluated: the newest one published is "
                f"{self._newest}, the engines are at {asked}; evaluate a version after "
                "publishing it and before publishing the next one"
            )
        future: concurrent.futures.Future[EvaluationResult] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        # As many samples a call as a training call has, so that an engine fits both.
        size = max(1, self._plan.request_groups * self._plan.group_size // count)
        calls = [
            range(first, min(first + size, len(prompts))) for first in range(0, len(prompts), size)
        ]
        pending = PendingEvaluation(version, tuple(prompts), count, calls, future)
        self._evaluations.append(pending)
        self._wake.set()
        return future

    async def state(self, version: int) -> RolloutState:
        """The state before step `version`, once all that needs older versions is complete."""
        self._move_to(version)
        needed = self._scheduler.complete_before(version)
        # Without engines what is complete can still be saved.
        if self._ledger.complete < needed or not isinstance(self.failure, FleetDownError):
            await self._until(lambda: self._ledger.complete >= needed)
        return RolloutState(
            next_step=version,
            submitted=self._ledger.submitted,
            groups=tuple(one.group for _, one in sorted(self._ledger.finished.items())),
            groups_per_step=self._scheduler.groups_per_step,
            prompt_fingerprint=self._plan.prompt_fingerprint,
            consumed_ahead=tuple(sorted(self._ledger.ahead)),
        )

    async def release_memory(self) -> None:
        await self._fleet.release_memory(self._spawn)

    def raise_failure(self) -> None:
        """Raise what ended the run, if anything did."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure)) from self.failure

    def fail(self, failure: EngineError) -> None:
        """End the run: stop all tasks and fail everything that somebody waits for."""
        if self.failure is not None:
            return
        self.failure = failure
        for task in self._tasks:
            task.cancel()
        for evaluation in self._evaluations:
            evaluation.future.set_exception(failure)
        for published in self._published.values():
            published.released.set_exception(failure)
        self._evaluations.clear()
        self._published.clear()
        self._notify()

    async def shut_down(self, timeout_s: float) -> None:
        """Wait for the cancelled tasks, then close the engines; give up after the timeouts."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        await close_all(self._channels, timeout_s)

    # -- decisions ----------------------------------------------------------------------------

    async def _conduct(self) -> None:
        while True:
            for channel in self._channels:
                self._switch(channel)
            self._release_folders()
            for evaluation in self._evaluations:
                self._send_evaluation(evaluation)
            self._send_groups()
            self._meter.set_queue(self._ledger.waiting, self._ledger.unfinished)
            self._notify()
            await self._wake.wait()
            self._wake.clear()

    def _target_version(self) -> int:
        """The version that engines behind it load next.

        It rises, but for an evaluation of an older version that is held or kept.
        """
        first = min([self._ledger.first_unsent(), *(numbers[0] for numbers in self._returned)])
        version = self._scheduler.next_version(first, self._newest)
        # No engine passes the version of an evaluation that is not complete.
        return min([version, *(evaluation.version for evaluation in self._evaluations)])

    def _switch(self, channel: EngineChannel) -> None:
        """Start a weight switch where one is due and nothing still needs the version held."""
        version = self._target_version()
        due = channel.started and channel.asked == channel.version < version
        if due and self._scheduler.may_switch(version, self._ledger.complete):
            channel.ask(version)
            loading = self._load(channel, channel.life, self._published[version].folder, version)
            self._spawn(loading, f"loading version {version} into {channel.name}")

    def _release_folders(self) -> None:
        """Give back every folder that no engine is loading and none will be told to load."""
        target = self._target_version()
        loading = {one.asked for one in self._channels if one.version < one.asked}
        oldest = min(channel.version for channel in self._channels)
        if self._fleet.policy is not None:
            # What is under way may come back, and an engine may come back to sample it.
            target = min(target, self._scheduler.next_version(self._ledger.complete, self._newest))
            oldest = NO_VERSION
        for version in [version for version in self._published if version not in loading]:
            if version < target or version <= oldest:
                self._published.pop(version).released.set_result(None)

    def _send_evaluation(self, evaluation: PendingEvaluation) -> None:
        while evaluation.calls:
            channel = self._free_channel(lambda held: held == evaluation.version)
            if channel is None:
                return
            indices = evaluation.calls.pop(0)
            channel.reserve()
            name = f"evaluating version {evaluation.version} on {channel.name}"
            self._spawn(self._evaluate(channel, channel.life, evaluation, indices), name)

    def _send_groups(self) -> None:
        for numbers in sorted(self._returned, key=min):
            self._send_again(numbers)
        while True:
            first = self._ledger.first_unsent()
            channel = self._free_channel(partial(self._ledger.may_send, first))
            if channel is None:
                return
            size = self._plan.request_groups
            numbers = self._ledger.send((first // size + 1) * size, channel.version)
            channel.reserve()
            name = f"sampling submissions {first} to {numbers[-1]} on {channel.name}"
            self._spawn(self._sample(channel, channel.life, numbers), name)

    def _send_again(self, numbers: Sequence[int]) -> None:
        may_send = self._ledger.may_send
        channel = self._free_channel(lambda held: all(may_send(one, held) for one in numbers))
        if channel is None:
            return
        for number in numbers:
            self._ledger.send_again(number, channel.version)
        self._returned.remove(numbers)
        channel.reserve()
        sampling = self._sample(channel, channel.life, numbers)
        self._spawn(sampling, f"sampling submissions {numbers} again on {channel.name}")

    def _free_channel(self, suits: Callable[[int], bool]) -> EngineChannel | None:
        free = [one for one in self._channels if one.free and suits(one.version)]
        return min(free, key=lambda one: (one.tokens, one.calls), default=None)

    # -- tasks --------------------------------------------------------------------------------

    async def _start(self, channel: EngineChannel, life: int) -> None:
        with self._fleet.survived(channel, life, self._spawn):
            await channel.start()

    async def _load(self, channel: EngineChannel, life: int, folder: Path, version: int) -> None:
        with self._fleet.survived(channel, life, self._spawn):
            await channel.load(folder, version)

    async def _sample(self, channel: EngineChannel, life: int, numbers: Sequence[int]) -> None:
        wanted = [self._wanted(number) for number in numbers]
        filled = await self._complete(channel, life, wanted)
        if not filled:
            self._meter.add("resubmitted", len(numbers))
            self._returned.append(numbers)
            wanted = []
        for one, trajectories in zip(wanted, filled, strict=True):
            completed = Completed(Group(one.number, one.prompt, trajectories), self._ledger.version)
            self._ledger.finish(one.number, completed.group.oldest_version, completed)
        self._wake.set()

    async def _evaluate(
        self, channel: EngineChannel, life: int, evaluation: PendingEvaluation, indices: range
    ) -> None:
        # Negative, so that an engine never sees a training group's number twice at once.
        self._evaluated += len(indices)
        wanted = evaluation.wanted(indices, self._plan.seed, -self._evaluated)
        filled = await self._complete(channel, life, wanted)
        if filled:
            evaluation.filled.update(zip(indices, filled, strict=True))
        else:
            evaluation.calls.append(indices)
        if evaluation.finish():
            self._evaluations.remove(evaluation)
        self._wake.set()

    async def _complete(
        self, channel: EngineChannel, life: int, wanted: Sequence[Wanted]
    ) -> list[tuple[Trajectory, ...]]:
        """The wanted groups' trajectories; empty where the engine failed and the fleet goes on."""
        filled: list[tuple[Trajectory, ...]] = []
        with self._fleet.survived(channel, life, self._spawn):
            filled = await self._sampler.complete(channel, wanted)
            channel.failures = 0
        return filled

    async def _watch(self) -> None:
        limit = self._plan.stall_timeout_s
        while True:
            await asyncio.sleep(limit / 4)
            stalled = self._meter.stalled(limit)
            if stalled is not None:
                raise EngineError(f"{stalled}; it hangs or stall_timeout_s is too short")

    def _wanted(self, number: int) -> Wanted:
        def refuse(sample: Sample) -> Refusal | None:
            oldest, newest = int(sample.versions.min()), int(sample.versions.max())
            if self._ledger.keeps_lag(number, oldest, newest):
                return None
            detail = f"versions {oldest} to {newest}, {self._scheduler.lag} of submission {number}"
            exact = self._scheduler.required_version(number) is not None
            return Refusal("version_not_exact" if exact else "version_too_old", detail)

        return Wanted(
            number=number,
            label=f"submission {number}",
            prompt=self._plan.prompt_at(number),
            count=self._plan.group_size,
            seed_key=(self._plan.seed, "group", number),
            refuse=refuse,
        )

    # -- plumbing -----------------------------------------------------------------------------

    def _batch(self) -> list[list[Completed]]:
        """The batch that was given out, one list a step."""
        steps = self._ledger.batch()
        assert steps is not None
        return [[self._ledger.finished[number] for number in numbers] for numbers in steps]

    def _move_to(self, version: int) -> None:
        """Note that the learner has reached `version`; drop the batch that it used."""
        ledger = self._ledger
        if version == ledger.version:
            return
        if version != ledger.version + self._scheduler.steps_per_batch or not ledger.batch_given:
            raise ValueError(
                f"version {version} is out of turn: the learner is at {ledger.version} and was "
                f"{'' if ledger.batch_given else 'not yet '}given the batch of that step"
            )
        ledger.advance()

    async def _until(self, ready: Callable[[], bool]) -> None:
        self.raise_failure()
        while not ready():
            await self._changed.wait()
            self.raise_failure()

    def _notify(self) -> None:
        """Wake whoever waits in `_until`, each to look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, EngineError):
            self.fail(error)
        elif error is not None:
            failure = EngineError(
                f"the rollout loop failed while {task.get_name()}: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self.fail(failure)
