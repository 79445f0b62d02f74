"""What the driver counts and times, and how it notices that nothing moves any more."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Activity = Literal["start", "sample", "switch", "grade", "learner_wait"]
LEARNER = "the learner"


@dataclass
class _Span:
    """Time during which at least one call of a kind was open."""

    open: int = 0
    since: float = 0.0
    progress: float = 0.0
    total: float = 0.0


class Meter:
    """Written by the driver's loop, read by any thread; every figure is since the last `read`."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._lock = threading.Lock()
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._spans: dict[tuple[Activity, str], _Span] = {}
        self._read_at = time.monotonic()
        self._queue = 0
        self._in_flight = 0
        self._notes: dict[str, float] = {}
        # Seconds in which an engine sampled and the learner did not wait, up to `_overlap_at`.
        self._overlap = 0.0
        self._overlap_at = self._read_at

    def add(self, name: str, value: float = 1) -> float:
        """Add to a count and return its new value."""
        with self._lock:
            self._counts[name] += value
            return self._counts[name]

    def set_queue(self, finished: int, in_flight: int) -> None:
        """Groups that wait for the learner, and groups that the engines hold."""
        with self._lock:
            self._queue, self._in_flight = finished, in_flight

    def note(self, figures: Mapping[str, float]) -> None:
        """Figures that the next `read` reports as they are, once."""
        with self._lock:
            self._notes |= figures

    @contextmanager
    def during(self, activity: Activity, who: str) -> Iterator[None]:
        """Time one call; overlapping calls of the same kind and party count once."""
        with self._lock:
            span = self._spans.setdefault((activity, who), _Span())
            now = self._count_overlap()
            if span.open == 0:
                span.since = span.progress = now
            span.open += 1
        try:
            yield
        finally:
            with self._lock:
                span.progress = self._count_overlap()
                span.open -= 1
                if span.open == 0:
                    span.total += span.progress - span.since

    def stalled(self, limit_s: float) -> str | None:
        """Name what has open calls but has answered none of them for `limit_s` seconds."""
        now = time.monotonic()
        with self._lock:
            for (activity, who), span in self._spans.items():
                # The learner waits as long as the engines take.
                if span.open and activity != "learner_wait" and now - span.progress > limit_s:
                    waited = now - span.progress
                    return f"{who}: no answer to {span.open} {activity} call(s) for {waited:.0f} s"
        return None

    def read(self) -> dict[str, float]:
        """Return all figures and start counting anew.

        sampled_tokens, tokens_per_s (over wall time), engine_busy_s and engine_idle_s (summed
        over engines; busy: a sampling call is open), learner_idle_s (blocked for a batch),
        overlap_share (of wall time: an engine sampled and the learner was not blocked), switch_s,
        grade_s, queue_groups (complete, no step has taken them), in_flight_groups, graded,
        resampled, refused/<reason>; and what was noted, see `staleness`.
        """
        with self._lock:
            now = self._count_overlap()
            seconds = self._take_seconds(now)
            elapsed = now - self._read_at
            values: dict[str, float] = dict.fromkeys(("sampled_tokens", "graded", "resampled"), 0.0)
            values |= self._counts | self._notes
            values |= {
                "tokens_per_s": values["sampled_tokens"] / elapsed if elapsed > 0 else 0.0,
                "engine_busy_s": seconds["sample"],
                "engine_idle_s": max(0.0, self._engines * elapsed - seconds["sample"]),
                "learner_idle_s": seconds["learner_wait"],
                "overlap_share": self._overlap / elapsed if elapsed > 0 else 0.0,
                "switch_s": seconds["switch"],
                "grade_s": seconds["grade"],
                "queue_groups": float(self._queue),
                "in_flight_groups": float(self._in_flight),
            }
            self._counts.clear()
            self._notes.clear()
            self._overlap, self._read_at = 0.0, now
            return values

    def _take_seconds(self, now: float) -> defaultdict[Activity, float]:
        """Seconds of each activity, summed over parties, since the last call."""
        seconds: defaultdict[Activity, float] = defaultdict(float)
        for (activity, _), span in self._spans.items():
            seconds[activity] += span.total
            span.total = 0.0
            if span.open:
                seconds[activity] += now - span.since
                span.since = now
        return seconds

    def _count_overlap(self) -> float:
        """Bring the overlap up to now, before what is open changes; return the time."""
        now = time.monotonic()
        waits = self._spans.get(("learner_wait", LEARNER))
        sampling = any(span.open for (kind, _), span in self._spans.items() if kind == "sample")
        if sampling and not (waits and waits.open):
            self._overlap += now - self._overlap_at
        self._overlap_at = now
        return now
