"""An engine whose answers are a pure function of its requests, for injecting faults and delays.

Time passes in turns of the event loop, not in seconds: a response of T tokens takes T turns, so
responses overtake each other and weights switch inside them without any clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron_gmc.rollout.driver import RolloutDriver
from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.sampling import GradeJob
from megatron_gmc.rollout.scheduler import ExactLag, Lag, LagScheduler
from megatron_gmc.rollout.state import RolloutState
from megatron_gmc.rollout.types import (
    Group,
    Prompt,
    Refusal,
    Sample,
    SampleRequest,
    SamplingParams,
)

VOCABULARY = 50
PROMPTS = 7
FOLDER = Path("weights")

Tamper = Callable[[SampleRequest, int, Sample], Sample | Refusal]
BeforeToken = Callable[[SampleRequest, int, int], Awaitable[None]]


def untouched(request: SampleRequest, member: int, sample: Sample) -> Sample | Refusal:
    return sample


async def one_turn(request: SampleRequest, member: int, position: int) -> None:
    await asyncio.sleep(0)


def response_length(seed: int, member: int, alpha: float) -> int:
    """Pareto distributed, at least 1; heavy-tailed for alpha below 2."""
    draw = np.random.default_rng([seed, member]).pareto(alpha)
    return int(min(draw, 5_000)) + 1


class ScriptedEngine:
    """`serial`: calls are worked off one by one, as one process with one model does."""

    def __init__(
        self,
        name: str = "scripted",
        *,
        alpha: float = 2.0,
        serial: bool = False,
        load_turns: int = 3,
        tamper: Tamper = untouched,
        before_token: BeforeToken = one_turn,
    ) -> None:
        self._name = name
        self.alpha = alpha
        self.load_turns = load_turns
        self.tamper = tamper
        self.before_token = before_token
        self.held = 0
        self.loads: list[int] = []
        self.calls: list[tuple[SampleRequest, ...]] = []
        self.closed = False
        self._turn: asyncio.Lock | None = asyncio.Lock() if serial else None

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        await asyncio.sleep(0)

    async def version(self) -> int:
        return self.held

    async def update_weights(self, folder: Path, version: int) -> None:
        self.loads.append(version)
        for _ in range(self.load_turns):
            await asyncio.sleep(0)
        self.held = version

    async def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> list[list[Sample | Refusal]]:
        self.calls.append(tuple(requests))
        if self._turn is None:
            return await self._sample(requests)
        async with self._turn:
            return await self._sample(requests)

    async def close(self) -> None:
        self.closed = True

    async def _sample(self, requests: Sequence[SampleRequest]) -> list[list[Sample | Refusal]]:
        members = [(request, member) for request in requests for member in range(request.count)]
        samples = iter(await asyncio.gather(*(self._respond(*one) for one in members)))
        return [[next(samples) for _ in range(request.count)] for request in requests]

    async def _respond(self, request: SampleRequest, member: int) -> Sample | Refusal:
        length = response_length(request.seed, member, self.alpha)
        random = np.random.default_rng([request.seed, member, 1])
        versions = []
        for position in range(length):
            await self.before_token(request, member, position)
            versions.append(self.held)
        sample = Sample(
            # Tokens depend on the weights, so that a wrong version shows.
            tokens=(random.integers(0, VOCABULARY, length) + np.array(versions)) % VOCABULARY,
            log_probs=-random.random(length, dtype=np.float32),
            versions=np.array(versions, dtype=np.int64),
            finish_reason="stop",
        )
        return self.tamper(request, member, sample)


class DyingEngine(ScriptedEngine):
    """Answers nothing until `doomed`; then every open and later sampling call fails."""

    doomed = False

    async def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> list[list[Sample | Refusal]]:
        while not self.doomed:
            await asyncio.sleep(0.001)
        raise EngineError("the process is gone; restart it")


def prompt_at(number: int) -> Prompt:
    """Prompts repeat every PROMPTS submissions, so one batch may hold a prompt twice."""
    index = number % PROMPTS
    return Prompt(id=f"p{index}", text=f"add {index}", tokens=(1, index), answer=str(index))


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def grade(jobs: Sequence[GradeJob]) -> list[float]:
    return [float(len(text) % 3 == len(prompt.answer)) for prompt, text, _ in jobs]


def make_driver(
    engines: Sequence[ScriptedEngine],
    scheduler: LagScheduler,
    state: RolloutState | None = None,
    **changes: Any,
) -> RolloutDriver:
    settings: dict[str, Any] = {
        "prompt_at": prompt_at,
        "grade": grade,
        "decode": decode,
        "params": SamplingParams(1.0, 100_000, (0,)),
        "group_size": 2,
        "vocabulary": VOCABULARY,
        "seed": 3,
        "prompt_fingerprint": "seven prompts",
        "close_timeout_s": 0.5,
    }
    return RolloutDriver(engines=engines, scheduler=scheduler, state=state, **(settings | changes))


@contextmanager
def running(driver: RolloutDriver, version: int = 0) -> Iterator[RolloutDriver]:
    """Start, publish the version that training starts at, and close whatever happens."""
    try:
        driver.start()
        driver.publish(version, FOLDER)
        yield driver
    finally:
        driver.close()


def learn(driver: RolloutDriver, steps: range, size: int = 1) -> dict[int, list[Group]]:
    """A learner without a policy: takes batches of `size` steps and publishes after each."""
    ledger = {}
    for start in steps[::size]:
        for step in range(start, start + size):
            ledger[step] = driver.next_batch(step)
        driver.publish(start + size, FOLDER)
    return ledger


def content(groups: Sequence[Group]) -> list[tuple[object, ...]]:
    """Everything in the groups, in a form that compares bit by bit."""
    return [
        (
            group.id,
            group.prompt,
            one.sample.tokens.tobytes(),
            one.sample.log_probs.tobytes(),
            one.sample.versions.tobytes(),
            one.sample.finish_reason,
            one.mask.tobytes(),
            one.reward,
        )
        for group in groups
        for one in group.trajectories
    ]


def flatten(ledger: dict[int, list[Group]]) -> list[Group]:
    return [group for _, groups in sorted(ledger.items()) for group in groups]


def versions_of(group: Group) -> set[int]:
    return {int(v) for one in group.trajectories for v in one.sample.versions}


def check_lag(ledger: dict[int, list[Group]], lag: Lag, size: int = 1) -> None:
    for step, groups in ledger.items():
        for group in groups:
            if isinstance(lag, ExactLag):
                assert versions_of(group) == {max(0, step // size * size - lag.k)}
            else:
                assert all(0 <= step - version <= lag.k for version in versions_of(group))
