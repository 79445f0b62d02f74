"""The scheduler's answers one by one; tests/lag holds what they guarantee together."""

from __future__ import annotations

import pytest

from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, Lag, LagScheduler


def test_an_engine_that_loads_late_bounds_the_pace() -> None:
    """L5: admission goes by the version that the engine holds, not by the learner's."""
    scheduler = LagScheduler(BoundedLag(1), groups_per_step=4)
    assert scheduler.may_submit(7, held=0)
    assert not scheduler.may_submit(8, held=0)
    assert scheduler.may_submit(8, held=1)


def test_nothing_is_sent_to_an_engine_without_weights() -> None:
    for lag in (ExactLag(3), BoundedLag(3)):
        assert not LagScheduler(lag, groups_per_step=1).may_submit(0, held=-1)


def test_exact_mode_names_the_version_and_bounded_mode_does_not() -> None:
    exact = LagScheduler(ExactLag(2), groups_per_step=3)
    assert [exact.required_version(n) for n in (0, 8, 9, 11, 12)] == [0, 0, 1, 1, 2]
    assert LagScheduler(BoundedLag(2), groups_per_step=3).required_version(9) is None


def test_exact_mode_refuses_newer_weights_too() -> None:
    """L1: an engine that is ahead may not sample for a step that wants older weights."""
    scheduler = LagScheduler(ExactLag(2), groups_per_step=3)
    assert [scheduler.may_submit(9, held) for held in (0, 1, 2)] == [False, True, False]
    assert scheduler.keeps_lag(9, oldest=1, newest=1)
    assert not scheduler.keeps_lag(9, oldest=1, newest=2)
    assert not scheduler.keeps_lag(9, oldest=2, newest=2)


def test_exact_mode_switches_only_after_the_old_version_is_done_with() -> None:
    scheduler = LagScheduler(ExactLag(2), groups_per_step=3)
    assert not scheduler.may_switch(1, complete=8)
    assert scheduler.may_switch(1, complete=9)
    assert LagScheduler(BoundedLag(2), groups_per_step=3).may_switch(1, complete=0)


def test_the_end_of_the_run_ends_submission_and_frees_the_last_versions() -> None:
    scheduler = LagScheduler(ExactLag(4), groups_per_step=2, steps=3)
    assert scheduler.may_submit(5, held=0)
    assert not scheduler.may_submit(6, held=0)
    assert scheduler.next_version(6, newest=3) == 3
    assert scheduler.may_switch(3, complete=6)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="lag k must be 0 or above, got -1"):
        ExactLag(-1)
    with pytest.raises(ValueError, match="lag k must be 0 or above, got -2"):
        BoundedLag(-2)
    with pytest.raises(ValueError, match="groups_per_step must be 1 or above, got 0"):
        LagScheduler(ExactLag(0), 0)
    with pytest.raises(ValueError, match="steps must be 0 or above, got -1"):
        LagScheduler(ExactLag(0), 1, steps=-1)


def test_steps_that_are_no_whole_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="steps_per_batch must be 1 or above, got 0"):
        LagScheduler(ExactLag(0), 1, steps_per_batch=0)
    with pytest.raises(ValueError, match="multiple of the 4 steps of a batch, got 10; 8 or 12"):
        LagScheduler(ExactLag(0), 1, steps=10, steps_per_batch=4)


@pytest.mark.parametrize(
    ("lag", "size", "message"),
    [
        (ExactLag(6), 4, "multiple of the 4 optimizer steps of a batch.*got 6; 4 or 8 would do"),
        (ExactLag(1), 4, "got 1; 4 would do"),
        (BoundedLag(2), 4, "a bound of 2 at step 3 .* with 4 optimizer steps.*use 3 or more"),
        (BoundedLag(3, first=(0, 0, 1)), 2, "a bound of 0 at step 1 cannot be kept"),
        (ExactLag(2, first=(0, 2)), 2, "steps 0 to 1 have 0, 2; change it every 2 steps"),
        (ExactLag(2, first=(2,)), 4, "got 2; 4 would do"),
        (ExactLag(5, first=(0, 0, 0, 1)), 1, "rise by 1 a batch.*from 1 to 5 at step 4"),
    ],
)
def test_a_lag_that_cannot_be_kept_is_refused(lag: Lag, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LagScheduler(lag, 1, steps_per_batch=size)


def test_overtaking_needs_one_bound() -> None:
    with pytest.raises(ValueError, match="earliest_deadline keeps one bound for the whole run"):
        BoundedLag(2, first=(1,), order="earliest_deadline")


def test_a_lag_may_rise_as_it_likes_while_it_asks_for_version_0() -> None:
    LagScheduler(ExactLag(16, first=(0,)), 1)
    LagScheduler(BoundedLag(16, first=(0, 0, 0, 0)), 1)


def test_only_published_versions_are_asked_for() -> None:
    """L4: with S = 4, bounded lag 5: step 10 needs version 5 or newer, which is 8."""
    scheduler = LagScheduler(BoundedLag(5), groups_per_step=2, steps_per_batch=4)
    assert [scheduler.oldest_version(2 * step) for step in range(5, 13)] == [0, 4, 4, 4, 4, 8, 8, 8]


def test_what_is_due_is_waited_for_and_what_is_not_is_overtaken() -> None:
    """Two groups a step, bound 1: group 0, unfinished, was sent at version 0 and is due at 1."""
    scheduler = LagScheduler(BoundedLag(1, order="earliest_deadline"), groups_per_step=2)
    finished = {1: 1, 2: 1, 3: 1}
    assert scheduler.choose(0, finished, unfinished=[1]) == [[1, 2]]
    # At step 1 it is its turn: nothing may be taken without it.
    assert scheduler.choose(1, {3: 1, 4: 2, 5: 2}, unfinished=[1]) is None
    assert scheduler.choose(1, {0: 1, 3: 1, 4: 2, 5: 2}, unfinished=[]) == [[0, 3]]


def test_nothing_is_overtaken_that_would_crowd_a_later_step() -> None:
    """Taking 4 and 5, due at step 3, would leave five groups for the four places up to step 2."""
    scheduler = LagScheduler(BoundedLag(2, order="earliest_deadline"), groups_per_step=2)
    assert scheduler.choose(0, {4: 3, 5: 3}, unfinished=[2, 2, 2, 2]) == [[4, 5]]
    assert scheduler.choose(0, {4: 3, 5: 3}, unfinished=[2, 2, 2, 2, 2]) is None


def test_mini_batches_take_what_is_due_first_and_then_by_submission() -> None:
    scheduler = LagScheduler(
        BoundedLag(3, order="earliest_deadline"), groups_per_step=1, steps_per_batch=2
    )
    assert scheduler.choose(4, {7: 4, 5: 6, 6: 5}, unfinished=[]) == [[7], [6]]
    assert scheduler.choose(4, {9: 6, 5: 8, 6: 7}, unfinished=[]) == [[6], [9]]


def test_lag_is_named_with_its_kind() -> None:
    assert str(ExactLag(16)) == "lag 16 (exact)"
    assert str(BoundedLag(16)) == "lag ≤ 16 (bounded)"
    assert str(BoundedLag(2, order="earliest_deadline")) == ("lag ≤ 2 (bounded, earliest deadline)")
    assert str(ExactLag(4, first=(0, 1, 2, 3))) == "lag 0 → 4 in 4 steps (exact)"
