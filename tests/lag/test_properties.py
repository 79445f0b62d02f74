"""The lag guarantees on random clusters: durations, failures, restarts, late weights."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, Lag
from tests.lag.cluster import Cluster, Made, Saved, Settings, check


@st.composite
def exact_lags(draw: st.DrawFn, size: int) -> ExactLag:
    """Multiples of `size` that rise by one batch at most and fall as they like."""
    lags = [draw(st.integers(0, 2))]
    for _ in range(draw(st.integers(0, 4))):
        lags.append(draw(st.integers(0, lags[-1] + 1)))
    first = [size * lag for lag in lags for _ in range(size)]
    if draw(st.booleans()):
        return ExactLag(size * draw(st.integers(0, 5)))
    return ExactLag(first[-1], tuple(first[:-size]))


@st.composite
def bounded_lags(draw: st.DrawFn, size: int) -> BoundedLag:
    k = draw(st.integers(size - 1, size + 4))
    kind = draw(st.sampled_from(["submission", "earliest_deadline", "schedule"]))
    if kind != "schedule":
        return BoundedLag(k, order=kind)
    steps = draw(st.integers(1, 8))
    return BoundedLag(k, tuple(draw(st.integers(step % size, 7)) for step in range(steps)))


@st.composite
def clusters(draw: st.DrawFn) -> Settings:
    size = draw(st.integers(1, 4))
    return Settings(
        lag=draw(exact_lags(size) | bounded_lags(size)),
        groups_per_step=draw(st.integers(1, 5)),
        steps=size * draw(st.integers(1, 9)),
        servers=draw(st.integers(1, 3)),
        slots=draw(st.integers(1, 8)),
        seed=draw(st.integers(0, 2**32)),
        steps_per_batch=size,
        failure_rate=draw(st.sampled_from([0.0, 0.3])),
        restart_rate=draw(st.sampled_from([0.0, 0.05])),
        load_time=draw(st.sampled_from([0.0, 1.0, 50.0])),
        learn_time=draw(st.sampled_from([0.0, 1.0, 50.0])),
        alpha=draw(st.sampled_from([0.8, 1.2, 3.0])),
        capped=draw(st.booleans()),
    )


@given(clusters())
@settings(max_examples=600, deadline=None)
def test_guarantees_hold_on_any_cluster(one: Settings) -> None:
    """L1 to L5: bound, order, queue, no deadlock, nothing discarded, across restarts."""
    check(Cluster(one))


@pytest.mark.parametrize("k", [0, 1])
def test_exact_lag_0_and_1(k: int) -> None:
    """L1: step t's tokens carry version t; version max(0, t − 1)."""
    steps = Cluster(Settings(ExactLag(k), 3, 12, servers=2, slots=4, seed=1)).run()
    seen = [{(made.oldest, made.newest) for made in taken} for taken in steps]
    assert seen == [{(max(0, step - k),) * 2} for step in range(12)]


HEAVY = Settings(BoundedLag(2), 10, 100, servers=2, slots=64, seed=5, learn_time=3.0)


@pytest.mark.parametrize("order", ["submission", "earliest_deadline"])
def test_heavy_tails_are_neither_dropped_nor_late(order: str) -> None:
    """L2: bounded lag 2, Pareto α = 1.2, 1,000 groups: what is consumed is what was submitted."""
    cluster = Cluster(replace(HEAVY, lag=BoundedLag(2, order=order)))
    check(cluster)
    consumed = {made.submission: made.duration for taken in cluster.consumed for made in taken}
    assert consumed == {number: made.duration for number, made in cluster.made.items()}
    assert len(consumed) == 1000
    # The tail is there, and it really made engines fall behind the learner.
    assert max(consumed.values()) > 50
    lags = {step - made.oldest for step, taken in enumerate(cluster.consumed) for made in taken}
    assert lags == {0, 1, 2}


def test_overtaking_happens_waits_less_and_shows_in_the_lengths() -> None:
    """By earliest deadline a long response is waited for when it is due, not at its turn."""
    in_order, overtaking = (
        Cluster(replace(HEAVY, lag=BoundedLag(2, order=order), learn_time=0.1))
        for order in ("submission", "earliest_deadline")
    )
    for cluster in (in_order, overtaking):
        check(cluster)
    numbers = [made.submission for taken in overtaking.consumed for made in taken]
    assert numbers != sorted(numbers)
    assert overtaking.now < in_order.now
    late = [
        made.duration
        for step, taken in enumerate(overtaking.consumed)
        for made in taken
        if made.submission // 10 < step
    ]
    assert mean(late) > 2 * mean(made.duration for made in overtaking.made.values())


@pytest.mark.parametrize("lag", [ExactLag(2), BoundedLag(2)], ids=str)
@pytest.mark.parametrize("version", [0, 7])
def test_restart_begins_inside_the_bound_and_does_not_wait(lag: Lag, version: int) -> None:
    """L3: from a checkpoint of version v with empty engines the next steps run and hold."""
    per_step = 2
    cluster = Cluster(Settings(lag, per_step, version + 6, servers=1, slots=2, seed=2))
    upto = cluster.scheduler.complete_before(version)
    finished = {
        number: Made(number, max(0, number // per_step - 2), max(0, number // per_step - 2), 1)
        for number in range(version * per_step, upto)
    }
    cluster.consumed = [[] for _ in range(version)]
    cluster.begin(Saved(version, upto, finished, set()))
    for step, taken in list(enumerate(cluster.run()))[version:]:
        assert [made.submission for made in taken] == [2 * step, 2 * step + 1]
        assert all(step - made.oldest <= 2 for made in taken)


def test_four_steps_on_one_batch() -> None:
    """L4: the mini-batches of an exact batch lag by k, k + 1, k + 2 and k + 3."""
    one = Settings(ExactLag(4), 3, 16, servers=2, slots=4, seed=1, steps_per_batch=4)
    cluster = Cluster(one)
    check(cluster)
    lags = [{step - made.oldest for made in taken} for step, taken in enumerate(cluster.consumed)]
    assert lags == [{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {4}, {5}, {6}, {7}, {4}, {5}, {6}, {7}]


def test_a_lag_that_ramps_up_and_falls() -> None:
    """The engines skip versions when the lag falls, and hold still while it rises."""
    lag = ExactLag(1, first=(0, 1, 2, 3, 3, 3, 0, 1))
    cluster = Cluster(Settings(lag, 2, 10, servers=2, slots=3, seed=4))
    check(cluster)
    versions = [{made.oldest for made in taken} for taken in cluster.consumed]
    assert versions == [{0}, {0}, {0}, {0}, {1}, {2}, {6}, {6}, {7}, {8}]
