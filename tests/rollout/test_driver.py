"""The driver with healthy engines: lag by the versions in the tokens, order, repeatability, resume.

The scripted engine's answers depend on seed, member and weights alone and take turns of the event
loop instead of time, so these tests are about order, never about speed.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gmc.rollout.sampling import derive_seed
from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, Lag, LagScheduler
from megatron_gmc.rollout.types import SampleRequest
from tests.rollout.scripted import (
    FOLDER,
    ScriptedEngine,
    check_lag,
    content,
    flatten,
    learn,
    make_driver,
    prompt_at,
    response_length,
    running,
    versions_of,
)

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_exact_lag_by_the_versions_in_the_tokens(k: int) -> None:
    """L1: step t's tokens carry version max(0, t − k), each in turn."""
    driver = make_driver([ScriptedEngine(serial=True)], LagScheduler(ExactLag(k), 3))
    with running(driver):
        ledger = learn(driver, range(8))
    seen = [set().union(*map(versions_of, groups)) for _, groups in sorted(ledger.items())]
    assert seen == [{max(0, step - k)} for step in range(8)]
    assert [group.id for group in flatten(ledger)] == list(range(24))


def test_heavy_tails_through_the_driver() -> None:
    """L2: bounded lag 2, Pareto α = 1.2, 1,000 groups: none older, none dropped, none reordered."""
    engines = [ScriptedEngine("one", alpha=1.2), ScriptedEngine("two", alpha=1.2)]
    driver = make_driver(engines, LagScheduler(BoundedLag(2), 10, steps=100))
    with running(driver):
        ledger = learn(driver, range(100))
        figures = driver.metrics()
    groups = flatten(ledger)
    check_lag(ledger, BoundedLag(2))
    assert [group.id for group in groups] == list(range(1000))
    lengths = [len(one.sample.tokens) for group in groups for one in group.trajectories]
    assert lengths == [
        response_length(derive_seed(3, "group", n, 0), member, 1.2)
        for n in range(1000)
        for member in range(2)
    ]
    assert max(lengths) > 100
    sent = [request.group_id for engine in engines for call in engine.calls for request in call]
    assert sorted(sent) == list(range(1000))
    assert figures["sampled_tokens"] == sum(lengths)
    assert figures["graded"] == 2000
    assert figures["resampled"] == 0


def test_weights_switched_inside_a_response() -> None:
    """L7: the trajectory keeps every token's version, and its lag counts from the oldest."""
    engine: ScriptedEngine

    async def wait_for_new_weights(request: SampleRequest, member: int, position: int) -> None:
        while request.group_id == 1 and position == 2 and engine.held == 0:
            await asyncio.sleep(0)

    engine = ScriptedEngine(before_token=wait_for_new_weights)
    # A seed whose second submission is long enough to be cut.
    seed = next(
        s for s in range(1000) if response_length(derive_seed(s, "group", 1, 0), 0, 2.0) >= 4
    )
    scheduler = LagScheduler(BoundedLag(1), 1, steps=2)
    driver = make_driver([engine], scheduler, group_size=1, seed=seed)
    with running(driver):
        (trajectory,) = learn(driver, range(2))[1][0].trajectories
    versions = trajectory.sample.versions.tolist()
    assert versions == [0, 0] + [1] * (len(versions) - 2)
    assert trajectory.oldest_version == 0


def test_exact_runs_repeat_whatever_the_timing_and_the_number_of_engines() -> None:
    def run(engines: list[ScriptedEngine]) -> list[tuple[object, ...]]:
        driver = make_driver(engines, LagScheduler(ExactLag(2), 4))
        with running(driver):
            return content(flatten(learn(driver, range(7))))

    async def slow(request: SampleRequest, member: int, position: int) -> None:
        for _ in range((request.group_id * 7 + position) % 5):
            await asyncio.sleep(0)

    first = run([ScriptedEngine(serial=True)])
    assert run([ScriptedEngine(serial=True)]) == first
    assert run([ScriptedEngine(load_turns=40, before_token=slow)]) == first
    assert run([ScriptedEngine("one"), ScriptedEngine("two", before_token=slow)]) == first


@pytest.mark.parametrize("request_groups", [None, 2, 1])
def test_calls_have_a_fixed_composition_and_order(request_groups: int | None) -> None:
    engine = ScriptedEngine(serial=True)
    driver = make_driver(
        [engine], LagScheduler(ExactLag(1), 4, steps=3), request_groups=request_groups
    )
    with running(driver):
        learn(driver, range(3))
    size = request_groups or 4
    calls = [[request.group_id for request in call] for call in engine.calls]
    assert calls == [list(range(first, first + size)) for first in range(0, 12, size)]
    requests = [request for call in engine.calls for request in call]
    assert len({request.seed for request in requests}) == 12
    assert all(request.prompt_tokens == prompt_at(request.group_id).tokens for request in requests)


def test_first_batches_are_sent_at_once_unless_calls_are_limited() -> None:
    for limit, expected in ((None, 4), (2, 2)):
        engine = ScriptedEngine(serial=True)

        async def never(request: SampleRequest, member: int, position: int) -> None:
            await asyncio.Event().wait()

        engine.before_token = never
        driver = make_driver([engine], LagScheduler(ExactLag(3), 2), calls_per_engine=limit)
        with running(driver):
            # An answered question means that the loop has gone on; the calls are out by then.
            while len(engine.calls) < expected:
                driver.checkpoint_state(0)
            for _ in range(20):
                driver.checkpoint_state(0)
            assert len(engine.calls) == expected


def test_one_prompt_twice_in_a_batch_is_two_groups() -> None:
    """G5: groups are told apart by submission, not by prompt."""
    driver = make_driver([ScriptedEngine()], LagScheduler(ExactLag(0), 9))
    with running(driver):
        batch = driver.next_batch(0)
    assert batch[0].prompt == batch[7].prompt
    assert [group.id for group in batch] == list(range(9))
    assert all(len(group.trajectories) == 2 for group in batch)
    assert content([batch[0]])[0][2:] != content([batch[7]])[0][2:]


@pytest.mark.parametrize("lag", [ExactLag(4), BoundedLag(5)], ids=str)
def test_four_steps_on_one_batch(lag: Lag) -> None:
    """L4: all four are there before the first, and weights come after the last."""
    engine = ScriptedEngine()
    driver = make_driver([engine], LagScheduler(lag, 2, steps=12, steps_per_batch=4))
    with running(driver):
        ledger = {step: driver.next_batch(step) for step in (3, 1, 0, 2)}
        assert content(driver.next_batch(1)) == content(ledger[1])
        for version in (1, 3):
            with pytest.raises(ValueError, match=f"version {version} is out of turn"):
                driver.publish(version, FOLDER)
        driver.publish(4, FOLDER)
        ledger |= learn(driver, range(4, 12), size=4)
    check_lag(ledger, lag, size=4)
    assert [group.id for group in flatten(ledger)] == list(range(24))
    assert set(engine.loads) <= {0, 4, 8, 12}


def test_finished_groups_overtake_one_that_is_not_due() -> None:
    """Group 0 is held back until the learner can go no further without it."""
    engine: ScriptedEngine
    released = False

    async def hold_back_the_first(request: SampleRequest, member: int, position: int) -> None:
        while request.group_id == 0 and position == 1 and not released:
            await asyncio.sleep(0.001)

    engine = ScriptedEngine(before_token=hold_back_the_first)
    lag = BoundedLag(2, order="earliest_deadline")
    # A seed whose first response is long enough to be held back inside.
    seed = next(
        s for s in range(1000) if response_length(derive_seed(s, "group", 0, 0), 0, 2.0) >= 2
    )
    scheduler = LagScheduler(lag, 2, steps=6)
    driver = make_driver([engine], scheduler, request_groups=1, seed=seed)
    with running(driver):
        ledger = learn(driver, range(2))
        assert sorted(group.id for group in flatten(ledger)) == [1, 2, 3, 4]
        state = driver.checkpoint_state(2)
        assert state.consumed_ahead == (1, 2, 3, 4)
        assert state.in_flight[0] == 0
        released = True
        ledger |= learn(driver, range(2, 6))
        figures = driver.metrics()
    assert 0 in [group.id for group in ledger[2]]
    check_lag(ledger, lag)
    assert sorted(group.id for group in flatten(ledger)) == list(range(12))
    assert figures["consumed_length_ratio"] > 0


clusters = st.builds(
    SimpleNamespace,
    lag=st.builds(ExactLag, st.integers(0, 3))
    | st.builds(
        BoundedLag,
        st.integers(0, 3),
        order=st.sampled_from(["submission", "earliest_deadline"]),
    ),
    request_groups=st.sampled_from([1, 2, 4]),
    engines=st.integers(1, 3),
    limit=st.sampled_from([None, 1, 2]),
    load_turns=st.integers(0, 60),
    alpha=st.sampled_from([0.9, 1.2, 3.0]),
    serial=st.booleans(),
    steps=st.integers(1, 6),
    seed=st.integers(0, 1000),
)


@given(clusters)
@settings(max_examples=40, deadline=None)
def test_the_driver_keeps_the_guarantees_on_any_cluster(one: SimpleNamespace) -> None:
    """L1, L2, L3: lag, order and queue, read from what the learner is handed."""
    engines = [
        ScriptedEngine(
            f"e{n}", alpha=one.alpha, serial=one.serial, load_turns=one.load_turns * (n + 1)
        )
        for n in range(one.engines)
    ]
    driver = make_driver(
        engines,
        LagScheduler(one.lag, 4),
        seed=one.seed,
        request_groups=one.request_groups,
        calls_per_engine=one.limit,
    )
    with running(driver):
        ledger = {}
        for step in range(one.steps):
            ledger[step] = driver.next_batch(step)
            figures = driver.metrics()
            assert figures["queue_groups"] + figures["in_flight_groups"] <= (one.lag.k + 1) * 4
            driver.publish(step + 1, FOLDER)
    check_lag(ledger, one.lag)
    numbers = [group.id for group in flatten(ledger)]
    assert len(set(numbers)) == 4 * one.steps
    if one.lag != BoundedLag(one.lag.k, order="earliest_deadline"):
        assert numbers == list(range(4 * one.steps))
    for engine in engines:
        assert engine.loads == sorted(set(engine.loads))


class FolderReader(ScriptedEngine):
    """Needs the folder from the beginning to the end of a load."""

    async def update_weights(self, folder: Path, version: int) -> None:
        assert folder.is_dir(), folder
        await super().update_weights(folder, version)
        assert folder.is_dir(), folder


@pytest.mark.parametrize("lag", [ExactLag(2), BoundedLag(2)], ids=str)
def test_folders_can_be_deleted_when_given_back(tmp_path: Path, lag: Lag) -> None:
    """One fast and one very slow engine; every folder goes as soon as its future is done."""
    engines = [FolderReader("one"), FolderReader("two", load_turns=500)]
    driver = make_driver(engines, LagScheduler(lag, 2))

    def publish(version: int) -> Future[None]:
        folder = tmp_path / str(version)
        folder.mkdir()
        future = driver.publish(version, folder)
        future.add_done_callback(lambda done: None if done.exception() else folder.rmdir())
        return future

    driver.start()
    try:
        futures = [publish(0)]
        for step in range(8):
            driver.next_batch(step)
            futures.append(publish(step + 1))
            # k + 1 that may be asked for, and the one that the slow engine still reads.
            assert sum(not future.done() for future in futures) <= lag.k + 2
        for future in futures:
            future.result(60)
    finally:
        driver.close()
    assert list(tmp_path.iterdir()) == []
    assert engines[0].loads == list(range(9)) or isinstance(lag, BoundedLag)


def test_steps_and_versions_out_of_turn_are_refused() -> None:
    driver = make_driver([ScriptedEngine()], LagScheduler(BoundedLag(3), 2))
    with running(driver):
        with pytest.raises(ValueError, match="version 1 is out of turn: the learner is at 0"):
            driver.next_batch(1)
        with pytest.raises(ValueError, match="version 0 cannot be published after version 0"):
            driver.publish(0, FOLDER)
        first = driver.next_batch(0)
        assert content(driver.next_batch(0)) == content(first)
        driver.next_batch(1)
        with pytest.raises(ValueError, match="version 0 is out of turn"):
            driver.next_batch(0)


def test_a_step_whose_weights_were_never_published_does_not_wait_for_them() -> None:
    driver = make_driver([ScriptedEngine()], LagScheduler(ExactLag(0), 2))
    with running(driver):
        driver.next_batch(0)
        with pytest.raises(ValueError, match="step 1 waits for samples of version 1 or newer"):
            driver.next_batch(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_groups": 3}, "request_groups must divide the 4 groups of a step, got 3"),
        ({"group_size": 0}, "must be 1 or above, got 1, 0 and None"),
        ({"calls_per_engine": 0}, "must be 1 or above, got 1, 2 and 0"),
        ({"attempts": 0}, "attempts must be 1 or above, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_driver([ScriptedEngine()], LagScheduler(ExactLag(0), 4), **changes)


def test_metrics_count_since_the_last_call() -> None:
    driver = make_driver([ScriptedEngine()], LagScheduler(ExactLag(1), 2, steps=2))
    with running(driver):
        learn(driver, range(2))
        figures, after = driver.metrics(), driver.metrics()
    assert figures["graded"] == 8
    assert figures["sampled_tokens"] > 0
    assert figures["tokens_per_s"] > 0
    assert figures["engine_busy_s"] > 0
    assert figures["learner_idle_s"] > 0
    assert figures["in_flight_groups"] == figures["queue_groups"] == 0
    assert (after["graded"], after["sampled_tokens"], after["learner_idle_s"]) == (0, 0, 0)
