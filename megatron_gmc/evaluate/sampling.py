"""Samples and grades prompts on an engine, with the parts that training's held-out curve uses."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence

from megatron_gmc.evaluate.config import SamplingConfig
from megatron_gmc.evaluate.statistics import Outcome
from megatron_gmc.evaluate.votes import can_vote, vote
from megatron_gmc.rollout.channel import EngineChannel
from megatron_gmc.rollout.engine import Engine
from megatron_gmc.rollout.evaluation import PendingEvaluation
from megatron_gmc.rollout.meter import Meter
from megatron_gmc.rollout.sampling import GradeJob as RolloutJob
from megatron_gmc.rollout.sampling import GroupSampler
from megatron_gmc.rollout.types import Prompt, SamplingParams, Trajectory
from megatron_gmc.setup_checks import Task
from megatron_gmc.tasks.config import GraderConfig
from megatron_gmc.tasks.graders import GradeJob
from megatron_gmc.tasks.prompts import response_text

Finished = Callable[[int, Outcome], None]
"""Told place and outcome of each finished prompt, in the order in which they finish."""


class PromptSampler:
    """Fills prompts with n graded responses on one engine that keeps its weights."""

    def __init__(self, engine: Engine, config: SamplingConfig, vocabulary: int) -> None:
        self._engine = engine
        self._config = config
        self._vocabulary = vocabulary
        self._meter = Meter(1)
        self._channel = EngineChannel(engine, self._meter, None, lambda: None)

    async def start(self) -> int:
        """Start the engine; returns the version of the weights that it serves."""
        await self._channel.start()
        version = await self._engine.version()
        self._channel.ask(version)
        self._channel.version = version
        return version

    async def sample(
        self,
        task: Task,
        grader: GraderConfig,
        prompts: Sequence[Prompt],
        places: Sequence[int],
        finished: Finished,
    ) -> None:
        """Sample the prompts at `places`; raises EngineError where the engine fails for good."""
        pending = PendingEvaluation(
            self._channel.version, prompts, self._config.samples, [], concurrent.futures.Future()
        )
        sampler = GroupSampler(
            SamplingParams(
                temperature=self._config.temperature,
                max_response_tokens=self._config.max_response_tokens,
                stop_token_ids=task.stop_token_ids,
            ),
            lambda jobs: task.grader.grade([_job(job) for job in jobs]),
            lambda tokens: _text(task, tokens),
            self._vocabulary,
            self._config.attempts,
            self._meter,
        )
        gate = asyncio.Semaphore(self._config.calls)

        async def call(chosen: range) -> None:
            async with gate:
                self._channel.reserve()
                wanted = pending.wanted(chosen, self._config.seed, chosen.start)
                groups = await sampler.complete(self._channel, wanted)
            for place, group in zip(chosen, groups, strict=True):
                finished(place, _outcome(task, grader, prompts[place], group))

        calls = [
            asyncio.create_task(call(chosen))
            for chosen in _calls(places, self._config.prompts_per_call)
        ]
        try:
            await asyncio.gather(*calls)
        finally:
            for one in calls:
                one.cancel()

    def refused(self) -> dict[str, float]:
        """How many samples were refused and sampled again, by reason, since the last call."""
        figures = self._meter.read()
        return {name: count for name, count in figures.items() if name.startswith("refused/")}

    async def close(self) -> None:
        await self._channel.close()


def _calls(places: Sequence[int], size: int) -> list[range]:
    """Stretches of neighbouring places, at most `size` long."""
    stretches: list[range] = []
    for place in places:
        last = stretches[-1] if stretches else range(0)
        if stretches and last.stop == place and len(last) < size:
            stretches[-1] = range(last.start, place + 1)
        else:
            stretches.append(range(place, place + 1))
    return stretches


def _job(job: RolloutJob) -> GradeJob:
    prompt, text, reason = job
    return GradeJob(text, prompt.answer, prompt.metadata, reason)


def _text(task: Task, tokens: Sequence[int]) -> str:
    ended = tokens[-1] in task.stop_token_ids
    return response_text(task.tokenizer, tokens, "stop" if ended else "length")


def _outcome(
    task: Task, grader: GraderConfig, prompt: Prompt, group: Sequence[Trajectory]
) -> Outcome:
    votes: tuple[str | None, ...] | None = None
    if can_vote(grader):
        votes = tuple(
            vote(grader, _text(task, one.sample.tokens.tolist()), one.sample.finish_reason)
            for one in group
        )
    return Outcome(
        prompt_id=prompt.id,
        rewards=tuple(one.reward for one in group),
        tokens=tuple(len(one.sample.tokens) for one in group),
        truncated=tuple(one.sample.finish_reason == "length" for one in group),
        votes=votes,
    )
