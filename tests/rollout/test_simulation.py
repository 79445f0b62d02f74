"""Simulated runs whose figures a closed form gives: constant lengths on engines that just fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, Lag, LagScheduler
from megatron_gmc.rollout.simulation import Cluster, Figures, Simulation

# 2 engines × 4 places for the 8 responses of a step, each 50 tokens at 10 tokens/s: 5 s.
CLUSTER = Cluster(
    engines=2,
    concurrency=4,
    tokens_per_s=40,
    calls_per_engine=2,
    learn_s=3,
    publish_s=0.5,
    load_s=1,
)
SAMPLE_S = 5


def simulated(cluster: Cluster, lag: Lag, steps_per_batch: int = 1) -> Figures:
    scheduler = LagScheduler(lag, groups_per_step=4, steps_per_batch=steps_per_batch)
    return Simulation(cluster, scheduler, lambda submission: [50, 50]).run(40)


@pytest.mark.parametrize("lag", [ExactLag(0), BoundedLag(0)], ids=str)
def test_at_lag_0_everything_follows_everything(lag: Lag) -> None:
    figures = simulated(CLUSTER, lag)
    period = 1 + SAMPLE_S + 3 + 0.5
    assert figures.steps_per_hour == pytest.approx(3600 / period)
    assert figures.tokens_per_s == pytest.approx(400 / period)
    assert figures.learner_idle == pytest.approx((1 + SAMPLE_S) / period)
    assert figures.engine_idle == pytest.approx(1 - SAMPLE_S / period)
    assert figures.slot_idle == pytest.approx(1 - SAMPLE_S / period)
    assert figures.lags == {0: 1}
    assert figures.consumed_length_ratio == 1


@pytest.mark.parametrize("lag", [ExactLag(1), BoundedLag(1), ExactLag(3), BoundedLag(3)], ids=str)
@pytest.mark.parametrize("learn_s", [1, 20])
def test_from_lag_1_on_the_slower_side_sets_the_pace(lag: Lag, learn_s: float) -> None:
    figures = simulated(replace(CLUSTER, learn_s=learn_s), lag)
    period = max(SAMPLE_S + 1, learn_s + 0.5)
    assert figures.steps_per_hour == pytest.approx(3600 / period, rel=1e-2)
    assert figures.learner_idle == pytest.approx(1 - (learn_s + 0.5) / period, abs=1e-2)
    assert figures.slot_idle == pytest.approx(1 - SAMPLE_S / period, abs=1e-2)
    if isinstance(lag, ExactLag):
        assert figures.lags == {lag.k: 1}
    assert max(figures.lags) <= lag.k


def test_four_steps_on_one_batch() -> None:
    """L4: learning, publishing and loading once for four steps; lags k … k + 3 in equal parts."""
    figures = simulated(CLUSTER, ExactLag(0), steps_per_batch=4)
    # 32 responses on 8 places, four after another.
    assert figures.steps_per_hour == pytest.approx(4 * 3600 / (1 + 4 * SAMPLE_S + 4 * 3 + 0.5))
    assert figures.lags == {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}


def test_one_response_is_not_faster_alone() -> None:
    """Half of the places: the same time, the other half idle."""
    scheduler = LagScheduler(ExactLag(0), groups_per_step=2)
    figures = Simulation(CLUSTER, scheduler, lambda submission: [50, 50]).run(10)
    period = 1 + SAMPLE_S + 3 + 0.5
    assert figures.steps_per_hour == pytest.approx(3600 / period)
    assert figures.slot_idle == pytest.approx(1 - SAMPLE_S / period / 2)


def test_a_response_over_a_load_keeps_its_oldest_version() -> None:
    """L7: sampled by v and, after the load in its middle, v + 1; its lag counts from v."""
    figures = simulated(replace(CLUSTER, learn_s=1), BoundedLag(1))
    assert figures.lags == {1: 1}


def test_overtaking_takes_short_ones_first_but_loses_none() -> None:
    """Every eighth group is ten times as long; in the long run both orders consume the same."""
    cluster = replace(CLUSTER, load_s=0, learn_s=0.1, publish_s=0)

    def lengths(submission: int) -> list[int]:
        return [500, 50] if submission % 8 == 0 else [50, 50]

    runs = {
        order: Simulation(
            cluster, LagScheduler(BoundedLag(4, order=order), groups_per_step=4), lengths
        ).run(200)
        for order in ("submission", "earliest_deadline")
    }
    for figures in runs.values():
        assert figures.consumed_length_ratio == pytest.approx(1, abs=0.02)
        assert max(figures.lags) <= 4
    # What is finished does not wait for what is not.
    assert runs["earliest_deadline"].mean_lag < runs["submission"].mean_lag - 1
