"""What the driver counts and times, and how it notices that nothing moves any more."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Activity = Literal["start", "sample", "switch", "grade"]


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

    def add(self, name: str, value: float = 1) -> float:
        """Add to a count and return its new value."""
        with self._lock:
            self._counts[name] += value
            return self._counts[name]

    def set_queue(self, finished: int, in_flight: int) -> None:
        """Groups that wait for the learner, and groups that the engines hold."""
        with self._lock:
            self._queue, self._in_flight = finished, in_flight

    @contextmanager
    def during(self, activity: Activity, who: str) -> Iterator[None]:
        """Time one call; overlapping calls of the same kind and party count once."""
        with self._lock:
            span = self._spans.setdefault((activity, who), _Span())
            now = time.monotonic()
            if span.open == 0:
                span.since = span.progress = now
            span.open += 1
        try:
            yield
        finally:
            with self._lock:
                span.open -= 1
                span.progress = time.monotonic()
                if span.open == 0:
                    span.total += span.progress - span.since

    def stalled(self, limit_s: float) -> str | None:
        """Name what has open calls but has answered none of them for `limit_s` seconds."""
        now = time.monotonic()
        with self._lock:
            for (activity, who), span in self._spans.items():
                if span.open and now - span.progress > limit_s:
                    waited = now - span.progress
                    return f"{who}: no answer to {span.open} {activity} call(s) for {waited:.0f} s"
        return None

    def read(self) -> dict[str, float]:
        """Return all figures and start counting anew.

        sampled_tokens, tokens_per_s (over wall time), engine_busy_s and engine_idle_s (summed
        over engines; busy: a sampling call is open), switch_s, grade_s, wait_s (the learner
        blocked for a batch), queue_groups, in_flight_groups, graded, resampled,
        refused/<reason>.
        """
        with self._lock:
            now = time.monotonic()
            seconds = dict.fromkeys(("start", "sample", "switch", "grade"), 0.0)
            for (activity, _), span in self._spans.items():
                seconds[activity] += span.total
                span.total = 0.0
                if span.open:
                    seconds[activity] += now - span.since
                    span.since = now
            elapsed = now - self._read_at
            values: dict[str, float] = dict.fromkeys(
                ("sampled_tokens", "graded", "resampled", "wait_s"), 0.0
            )
            values |= self._counts
            values |= {
                "tokens_per_s": values["sampled_tokens"] / elapsed if elapsed > 0 else 0.0,
                "engine_busy_s": seconds["sample"],
                "engine_idle_s": max(0.0, self._engines * elapsed - seconds["sample"]),
                "switch_s": seconds["switch"],
                "grade_s": seconds["grade"],
                "queue_groups": float(self._queue),
                "in_flight_groups": float(self._in_flight),
            }
            self._counts.clear()
            self._read_at = now
            return values
