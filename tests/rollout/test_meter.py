"""What the driver counts, with a clock that the test holds."""

from __future__ import annotations

import pytest

from megatron_gmc.rollout import meter as module
from megatron_gmc.rollout.meter import LEARNER, Meter


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    held = Clock()
    monkeypatch.setattr(module, "time", held)
    return held


def test_overlap_is_when_an_engine_samples_and_the_learner_does_not_wait(clock: Clock) -> None:
    """Two engines sample for 4 and 6 of 10 s, the learner waits for 3 s of them."""
    meter = Meter(engines=2)
    with meter.during("sample", "one"), meter.during("sample", "two"):
        clock.now += 1
        with meter.during("learner_wait", LEARNER):
            clock.now += 3
    with meter.during("sample", "two"):
        clock.now += 2
    with meter.during("learner_wait", LEARNER):
        clock.now += 4
    figures = meter.read()
    assert figures["overlap_share"] == pytest.approx(0.3)
    assert figures["learner_idle_s"] == pytest.approx(7)
    assert figures["engine_busy_s"] == pytest.approx(10)
    assert figures["engine_idle_s"] == pytest.approx(10)


def test_what_is_open_counts_up_to_each_reading(clock: Clock) -> None:
    meter = Meter(engines=1)
    with meter.during("sample", "one"):
        clock.now += 2
        first = meter.read()
        clock.now += 3
    second = meter.read()
    assert (first["overlap_share"], second["overlap_share"]) == (1, 1)
    assert (first["engine_busy_s"], second["engine_busy_s"]) == (2, 3)


def test_notes_are_reported_once(clock: Clock) -> None:
    meter = Meter(engines=1)
    meter.note({"lag_waiting": 1.5})
    assert meter.read()["lag_waiting"] == 1.5
    assert "lag_waiting" not in meter.read()


def test_a_waiting_learner_is_no_stall(clock: Clock) -> None:
    meter = Meter(engines=1)
    with meter.during("learner_wait", LEARNER):
        clock.now += 99
        assert meter.stalled(10) is None
        with meter.during("sample", "one"):
            clock.now += 11
            assert meter.stalled(10) == "one: no answer to 1 sample call(s) for 11 s"
