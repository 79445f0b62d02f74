"""Checkpoint and resume of the rollout: every submission once, in exact mode to the bit."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, Lag, LagScheduler
from megatron_gmc.rollout.state import RolloutState
from megatron_gmc.rollout.types import Group, SampleRequest
from tests.rollout.scripted import (
    FOLDER,
    ScriptedEngine,
    check_lag,
    content,
    flatten,
    learn,
    make_driver,
    running,
    versions_of,
)

pytestmark = pytest.mark.timeout(120)


OVERTAKING = BoundedLag(3, order="earliest_deadline")
LAGS = [ExactLag(0), ExactLag(3), BoundedLag(0), BoundedLag(3), OVERTAKING]


@pytest.mark.parametrize("lag", LAGS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_each_prompt_is_consumed_once_over_random_kills(
    tmp_path: Path, lag: Lag, seed: int
) -> None:
    """D1, L3: killed at random points, the ledger has each submission once, within the bound.

    In exact mode it equals the uninterrupted run's to the bit.
    """
    chance, steps = random.Random(seed), 12
    scheduler = LagScheduler(lag, 3, steps)
    whole = make_driver([ScriptedEngine()], scheduler)
    with running(whole):
        expected = learn(whole, range(steps))
    ledger: dict[int, list[Group]] = {}
    saved, version = None, 0
    while version < steps:
        state = RolloutState.load(tmp_path) if saved is not None else None
        driver = make_driver([ScriptedEngine(load_turns=chance.randrange(20))], scheduler, state)
        with running(driver, version):
            # What was consumed after the checkpoint is undone by the kill.
            upto = min(steps, version + chance.randrange(1, 5))
            keep = chance.randrange(version, upto + 1)
            for step in range(version, upto):
                if step == keep:
                    (saved := driver.checkpoint_state(step)).save(tmp_path)
                ledger[step] = driver.next_batch(step)
                driver.publish(step + 1, FOLDER)
            if keep == upto:
                (saved := driver.checkpoint_state(upto)).save(tmp_path)
        version = keep
    check_lag(ledger, lag)
    numbers = [group.id for group in flatten(ledger)]
    assert (sorted(numbers) if lag == OVERTAKING else numbers) == list(range(36))
    if isinstance(lag, ExactLag):
        assert content(flatten(ledger)) == content(flatten(expected))


def test_exact_checkpoint_waits_for_all_that_older_versions_must_sample() -> None:
    driver = make_driver([ScriptedEngine(load_turns=200)], LagScheduler(ExactLag(2), 3))
    with running(driver):
        learn(driver, range(4))
        state = driver.checkpoint_state(4)
    ids = [group.id for group in state.groups]
    assert ids[:6] == list(range(12, 18))
    assert state.next_step == 4
    assert state.submitted >= 18


def test_a_checkpoint_with_overtaking_goes_on_where_it_was() -> None:
    """D1: what was consumed out of its turn is not sampled again, what was overtaken is."""
    engine = ScriptedEngine()

    async def hold_back_the_first(request: SampleRequest, member: int, position: int) -> None:
        if request.group_id == 0:
            await asyncio.Event().wait()

    engine.before_token = hold_back_the_first
    scheduler = LagScheduler(OVERTAKING, 1, steps=8)
    driver = make_driver([engine], scheduler)
    with running(driver):
        before = learn(driver, range(3))
        state = driver.checkpoint_state(3)
    assert state.consumed_ahead == (1, 2, 3)
    again = ScriptedEngine()
    resumed = make_driver([again], scheduler, state)
    with running(resumed, 3):
        after = learn(resumed, range(3, 8))
    check_lag(before | after, OVERTAKING)
    assert sorted(group.id for group in flatten(before | after)) == list(range(8))
    sent = [request.group_id for call in again.calls for request in call]
    assert 0 in sent
    assert not set(sent) & {1, 2, 3}
    with pytest.raises(ValueError, match="keep the lag and its order when resuming"):
        make_driver([ScriptedEngine()], LagScheduler(BoundedLag(3), 1, steps=8), state)


def test_a_checkpoint_inside_a_batch_is_refused() -> None:
    state = RolloutState(2, 4, (), groups_per_step=2, prompt_fingerprint="seven prompts")
    with pytest.raises(ValueError, match="after 2 steps, inside a batch of 4"):
        make_driver([ScriptedEngine()], LagScheduler(ExactLag(0), 2, steps_per_batch=4), state)


def test_bounded_checkpoint_leaves_out_what_is_in_flight() -> None:
    engine = ScriptedEngine()

    async def hold_back_the_third(request: SampleRequest, member: int, position: int) -> None:
        if request.group_id == 2:
            await asyncio.Event().wait()

    engine.before_token = hold_back_the_third
    scheduler = LagScheduler(BoundedLag(3), 1)
    driver = make_driver([engine], scheduler)
    with running(driver):
        driver.next_batch(0)
        while len((state := driver.checkpoint_state(0)).groups) < 3:
            pass
    assert [group.id for group in state.groups] == [0, 1, 3]
    assert state.in_flight == [2]
    resumed = make_driver([ScriptedEngine()], scheduler, state)
    with running(resumed):
        ledger = learn(resumed, range(4))
    assert [group.id for group in flatten(ledger)] == [0, 1, 2, 3]


def test_a_resumed_run_samples_only_what_is_missing() -> None:
    """D1: also when calls are now of another size than when the checkpoint was made."""
    engine = ScriptedEngine()

    async def hold_back_the_first(request: SampleRequest, member: int, position: int) -> None:
        if request.group_id == 0:
            await asyncio.Event().wait()

    engine.before_token = hold_back_the_first
    scheduler = LagScheduler(BoundedLag(0), 3)
    driver = make_driver([engine], scheduler, request_groups=1)
    with running(driver):
        while len((state := driver.checkpoint_state(0)).groups) < 2:
            pass
    again = ScriptedEngine()
    resumed = make_driver([again], scheduler, state, request_groups=3)
    with running(resumed):
        groups = resumed.next_batch(0)
    assert [[request.group_id for request in call] for call in again.calls] == [[0]]
    assert content(groups[1:]) == content(state.groups)


def test_nothing_is_sampled_before_the_weights_of_this_run_are_there() -> None:
    """L3: an engine that survived from before, whatever it holds, serves only after a load."""
    engine = ScriptedEngine()
    engine.held = 5
    driver = make_driver([engine], LagScheduler(BoundedLag(9), 2))
    driver.start()
    try:
        with pytest.raises(ValueError, match="publish version 0 first"):
            driver.next_batch(0)
        assert engine.calls == []
        driver.publish(0, FOLDER)
        assert versions_of(driver.next_batch(0)[0]) == {0}
    finally:
        driver.close()


def test_a_state_of_another_run_is_refused_before_anything_starts() -> None:
    """D4: other prompts than the checkpoint's."""
    state = RolloutState(0, 0, (), groups_per_step=2, prompt_fingerprint="others")
    with pytest.raises(ValueError, match="resume with the same prompts"):
        make_driver([ScriptedEngine()], LagScheduler(ExactLag(0), 2), state)
