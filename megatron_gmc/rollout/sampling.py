"""Fills groups: samples, checks, grades, and samples again whatever was refused."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from megatron_gmc.rollout.channel import EngineChannel
from megatron_gmc.rollout.engine import EngineError, NoEngineCanError
from megatron_gmc.rollout.meter import Meter
from megatron_gmc.rollout.types import (
    FinishReason,
    Prompt,
    Refusal,
    Sample,
    SampleRequest,
    SamplingParams,
    Trajectory,
    check_sample,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

GradeJob = tuple[Prompt, str, FinishReason]
Decode = Callable[[Sequence[int]], str]


class Grade(Protocol):
    """Rewards of decoded responses, one for each job in order.

    Called from one thread at a time, never from the training thread. It must return: a time
    limit for each answer is the grader's own business.
    """

    def __call__(self, jobs: Sequence[GradeJob]) -> list[float]: ...


@dataclass(frozen=True)
class Wanted:
    """`count` trajectories of one prompt, all of which must pass `refuse`.

    `seed_key` names the request; with the attempt's number it fixes the seed.
    """

    number: int
    label: str
    prompt: Prompt
    count: int
    seed_key: tuple[int | str, ...]
    refuse: Callable[[Sample], Refusal | None]


def derive_seed(*key: int | str) -> int:
    """A seed in [0, 2⁶³) that depends on `key` alone."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass
class _Filling:
    """A wanted group under way; a place is None until an accepted trajectory stands there."""

    wanted: Wanted
    places: list[Trajectory | None] = field(init=False)
    last_refusal: Refusal | None = None

    def __post_init__(self) -> None:
        self.places = [None] * self.wanted.count

    @property
    def missing(self) -> list[int]:
        return [place for place, trajectory in enumerate(self.places) if trajectory is None]

    def request(self, attempt: int) -> SampleRequest:
        return SampleRequest(
            group_id=self.wanted.number,
            prompt_tokens=self.wanted.prompt.tokens,
            count=len(self.missing),
            seed=derive_seed(*self.wanted.seed_key, attempt),
        )


@dataclass(frozen=True)
class _Candidate:
    """A sample that passed every check but the grader's."""

    filling: _Filling
    place: int
    sample: Sample


class GroupSampler:
    """Turns wanted groups into complete ones on one engine.

    A refused sample is counted as refused/<reason>; only the missing places are asked for again,
    in one call for all groups concerned. Members never mix attempts inside one trajectory.
    """

    def __init__(
        self,
        params: SamplingParams,
        grade: Grade,
        decode: Decode,
        vocabulary: int,
        attempts: int,
        meter: Meter,
    ) -> None:
        if attempts < 1:
            raise ValueError(f"attempts must be 1 or above, got {attempts}")
        self._params = params
        self._grade = grade
        self._decode = decode
        self._vocabulary = vocabulary
        self._attempts = attempts
        self._meter = meter
        self._grading = asyncio.Lock()

    async def complete(
        self, channel: EngineChannel, wanted: Sequence[Wanted]
    ) -> list[tuple[Trajectory, ...]]:
        """Return each wanted group's trajectories in sample order; the call is reserved already.

        Raises EngineError, naming prompt, reason and counter, when a group is still incomplete
        after the last attempt.
        """
        fillings = [_Filling(one) for one in wanted]
        for attempt in range(self._attempts):
            unfilled = [filling for filling in fillings if filling.missing]
            if not unfilled:
                break
            if attempt > 0:
                channel.reserve()
                self._meter.add("resampled", sum(len(filling.missing) for filling in unfilled))
            requests = [filling.request(attempt) for filling in unfilled]
            answers = await channel.sample(requests, self._params)
            await self._accept(self._candidates(channel, unfilled, answers))
        return [self._trajectories(filling) for filling in fillings]

    def _candidates(
        self,
        channel: EngineChannel,
        unfilled: Sequence[_Filling],
        answers: Sequence[Sequence[Sample | Refusal]],
    ) -> list[_Candidate]:
        candidates = []
        for filling, answer in zip(unfilled, answers, strict=True):
            for place, sample in zip(filling.missing, answer, strict=True):
                refusal = self._refusal(channel, filling.wanted, sample)
                if refusal is not None:
                    self._refuse(filling, place, refusal)
                elif isinstance(sample, Sample):
                    self._meter.add("sampled_tokens", len(sample.tokens))
                    candidates.append(_Candidate(filling, place, sample))
        return candidates

    def _refusal(
        self, channel: EngineChannel, wanted: Wanted, sample: Sample | Refusal
    ) -> Refusal | None:
        if isinstance(sample, Refusal):
            return sample
        refusal = check_sample(
            sample,
            vocabulary=self._vocabulary,
            max_response_tokens=self._params.max_response_tokens,
            versions=channel.versions,
        )
        return refusal or wanted.refuse(sample)

    async def _accept(self, candidates: Sequence[_Candidate]) -> None:
        """Grade the candidates and put those with a finite reward into their places."""
        if not candidates:
            return
        async with self._grading:
            with self._meter.during("grade", "the grader"):
                rewards = await in_daemon_thread(lambda: self._rewards(candidates))
        self._meter.add("graded", len(rewards))
        for candidate, reward in zip(candidates, rewards, strict=True):
            filling, sample = candidate.filling, candidate.sample
            if math.isfinite(reward):
                mask = np.ones(len(sample.tokens), dtype=np.bool_)
                filling.places[candidate.place] = Trajectory(sample, mask, reward)
            else:
                refusal = Refusal("reward_not_finite", f"reward {reward}")
                self._refuse(filling, candidate.place, refusal)

    def _rewards(self, candidates: Sequence[_Candidate]) -> list[float]:
        jobs: list[GradeJob] = [
            (
                candidate.filling.wanted.prompt,
                self._decode(candidate.sample.tokens.tolist()),
                candidate.sample.finish_reason,
            )
            for candidate in candidates
        ]
        rewards = [float(reward) for reward in self._grade(jobs)]
        if len(rewards) != len(jobs):
            raise ValueError(
                f"the grader returned {len(rewards)} rewards for {len(jobs)} responses"
            )
        return rewards

    def _refuse(self, filling: _Filling, place: int, refusal: Refusal) -> None:
        filling.last_refusal = refusal
        count = self._meter.add(f"refused/{refusal.reason}")
        # The first of each kind is news; the others are in the counter.
        log.log(
            logging.WARNING if count == 1 else logging.DEBUG,
            "refused sample %d of %s, prompt %r: %s (%s); sampling it again",
            place,
            filling.wanted.label,
            filling.wanted.prompt.id,
            refusal.reason,
            refusal.detail,
        )

    def _trajectories(self, filling: _Filling) -> tuple[Trajectory, ...]:
        done = tuple(trajectory for trajectory in filling.places if trajectory is not None)
        if len(done) == len(filling.places):
            return done
        refusal = filling.last_refusal
        assert refusal is not None
        # a reward is the grader's, whichever engine sampled the response
        kind = NoEngineCanError if refusal.reason == "reward_not_finite" else EngineError
        raise kind(
            f"{filling.wanted.label}, prompt {filling.wanted.prompt.id!r}: "
            f"{len(filling.missing)} of {len(filling.places)} samples still refused after "
            f"{self._attempts} attempts, last for {refusal.reason} ({refusal.detail}); "
            f"counter refused/{refusal.reason}"
        )


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Await a blocking function; a thread that never returns cannot keep the process alive."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever awaits
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name="rollout-grade", daemon=True).start()
    return await asyncio.wrap_future(done)
