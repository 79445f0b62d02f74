"""The books of a run: what may go where, for the first time and again, and what is consumed."""

from __future__ import annotations

from megatron_gmc.rollout.ledger import Ledger
from megatron_gmc.rollout.scheduler import BoundedLag, ExactLag, LagScheduler

OVERTAKING = LagScheduler(BoundedLag(2, order="earliest_deadline"), groups_per_step=2)


def test_what_was_promised_to_a_version_goes_to_no_older_one() -> None:
    """Sent at version 1, group 4 is due at 3; an engine that is behind would make it 2."""
    ledger: Ledger[str] = Ledger(OVERTAKING)
    assert ledger.send(4, held=0) == [0, 1, 2, 3]
    assert ledger.send(5, held=1) == [4]
    assert not ledger.may_send(4, held=0)
    assert ledger.may_send(4, held=1)
    assert ledger.may_send(3, held=0)
    assert not ledger.keeps_lag(4, oldest=0, newest=1)
    assert ledger.keeps_lag(4, oldest=1, newest=1)


def test_in_order_of_submission_any_version_that_is_new_enough_will_do() -> None:
    ledger: Ledger[str] = Ledger(LagScheduler(BoundedLag(2), groups_per_step=2))
    ledger.send(5, held=1)
    assert ledger.may_send(4, held=0)
    assert ledger.keeps_lag(4, oldest=0, newest=1)


def test_a_batch_stays_as_it_was_given_until_it_is_used() -> None:
    ledger: Ledger[str] = Ledger(OVERTAKING)
    ledger.send(4, held=0)
    assert ledger.batch() is None
    for number in (3, 1):
        ledger.finish(number, 0, f"group {number}")
    assert ledger.batch() == [[1, 3]]
    ledger.finish(0, 0, "group 0")
    assert ledger.batch() == [[1, 3]]
    assert (ledger.waiting, ledger.unfinished) == (1, 1)
    ledger.advance()
    assert (ledger.version, ledger.ahead, ledger.finished) == (1, {1, 3}, {0: "group 0"})
    assert ledger.complete == 2
    ledger.finish(2, 0, "group 2")
    assert ledger.batch() == [[0, 2]]
    ledger.advance()
    assert (ledger.version, ledger.ahead, ledger.complete) == (2, set(), 4)


def test_a_restart_sends_what_is_missing_and_nothing_else() -> None:
    """D1: at version 1, groups 1 and 3 were consumed, 4 is finished, 0, 2 and 5 were under way."""
    ledger = Ledger(OVERTAKING, 1, 6, {4: (0, "group 4")}, ahead=(1, 3))
    assert ledger.unfinished == 4 - 1
    assert ledger.first_unsent() == 0
    assert ledger.send(8, held=1) == [0, 2, 5, 6, 7]
    assert ledger.submitted == 8


def test_exact_mode_counts_what_is_complete() -> None:
    ledger: Ledger[str] = Ledger(LagScheduler(ExactLag(1), groups_per_step=2))
    ledger.send(4, held=0)
    for number in (0, 2, 3):
        ledger.finish(number, 0, "")
    assert ledger.complete == 1
    ledger.finish(1, 0, "")
    assert ledger.complete == 4
