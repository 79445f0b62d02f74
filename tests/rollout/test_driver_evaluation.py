"""Evaluations beside the training samples, wholly at one version."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from megatron_gmc.rollout.evaluation import EvaluationResult
from megatron_gmc.rollout.sampling import derive_seed
from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, Lag, LagScheduler
from megatron_gmc.rollout.types import SampleRequest
from tests.rollout.scripted import (
    FOLDER,
    ScriptedEngine,
    check_lag,
    learn,
    make_driver,
    prompt_at,
    response_length,
    running,
)

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("lag", [ExactLag(0), ExactLag(3), BoundedLag(3)], ids=str)
def test_evaluations_are_sampled_wholly_at_their_version(lag: Lag) -> None:
    engine = ScriptedEngine(load_turns=30)
    held: dict[int, set[int]] = {}

    async def watch(request: SampleRequest, member: int, position: int) -> None:
        await asyncio.sleep(0)
        if request.group_id < 0:
            held.setdefault(request.group_id, set()).add(engine.held)

    engine.before_token = watch
    prompts = [prompt_at(n) for n in range(5)]
    driver = make_driver([engine], LagScheduler(lag, 2, steps=4))
    with running(driver):
        futures = {0: driver.evaluate(prompts, 0, 3)}
        ledger = {}
        for step in range(4):
            ledger[step] = driver.next_batch(step)
            driver.publish(step + 1, FOLDER)
            futures[step + 1] = driver.evaluate(prompts, step + 1, 3)
        results = {version: future.result(60) for version, future in futures.items()}
    check_lag(ledger, lag)
    assert [result.version for result in results.values()] == [0, 1, 2, 3, 4]
    # Request ids are unique, five for each evaluation in order, and each saw one version.
    assert len(held) == 25
    assert [v for number in sorted(held) for v in held[number]].count(3) == 5
    assert all(len(versions) == 1 for versions in held.values())
    result = results[4]
    assert result.rewards.shape == result.lengths.shape == result.truncated.shape == (5, 3)
    assert result.lengths.tolist() == [
        [response_length(derive_seed(3, "evaluation", n, 0), member, 2.0) for member in range(3)]
        for n in range(5)
    ]
    assert not result.truncated.any()
    assert result.mean_reward == np.mean(result.rewards)


def test_the_last_evaluation_samples_no_groups_that_no_step_consumes() -> None:
    engine = ScriptedEngine()
    driver = make_driver([engine], LagScheduler(ExactLag(5), 2, steps=3))
    with running(driver):
        learn(driver, range(3))
        result: EvaluationResult = driver.evaluate([prompt_at(0)], 3, 1).result(60)
        with pytest.raises(ValueError, match="step 3 is past the end, the run has 3 steps"):
            driver.next_batch(3)
    assert result.version == 3
    training = [request.group_id for call in engine.calls for request in call]
    assert sorted(number for number in training if number >= 0) == list(range(6))


def test_an_evaluation_that_cannot_be_had_is_refused() -> None:
    driver = make_driver([ScriptedEngine()], LagScheduler(BoundedLag(1), 2))
    with running(driver):
        with pytest.raises(ValueError, match="version 1 cannot be evaluated: the newest one"):
            driver.evaluate([prompt_at(0)], 1, 1)
        with pytest.raises(ValueError, match="needs a prompt and count ≥ 1, got 0, 1"):
            driver.evaluate([], 0, 1)
        driver.next_batch(0)
        driver.publish(1, FOLDER).result(60)
        with pytest.raises(ValueError, match="evaluate a version after publishing it"):
            driver.evaluate([prompt_at(0)], 0, 1)
