"""Where the seconds of a step go, and where in a step a process is."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ORDER = ("begin", "wait", "receive", "learn", "publish", "record", "drain", "checkpoint", "end")
"""The phases of a step in the order in which every rank goes through them."""
WAITING = ("wait", "drain")
"""Phases in which rank 0 waits for samples: of the batch, or of a checkpoint."""


@dataclass(frozen=True)
class Place:
    """Where a process is, and since when (`time.monotonic`)."""

    step: int
    phase: str
    since: float

    def __str__(self) -> str:
        return f"phase {self.phase} of step {self.step}"


class Phases:
    """Wall seconds by phase, of the step under way and of the whole run."""

    def __init__(self, first: int) -> None:
        self._step: defaultdict[str, float] = defaultdict(float)
        self._began = time.perf_counter()
        self.place = Place(first, ORDER[0], time.monotonic())
        """Set by the process's main thread alone; may be read from any."""

    def begin_step(self, step: int) -> None:
        """Note that step `step` begins."""
        self.place = Place(step, ORDER[0], time.monotonic())

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to `phase`, which is one of ORDER."""
        began = time.perf_counter()
        self.place = Place(self.place.step, phase, time.monotonic())
        try:
            yield
        finally:
            self._step[phase] += time.perf_counter() - began
            # Until the next phase is entered it counts as this one, from now on.
            self.place = Place(self.place.step, phase, time.monotonic())

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call, and `step`, all of them with what lies between."""
        now = time.perf_counter()
        seconds = {f"time/{phase}_s": spent for phase, spent in self._step.items()}
        seconds["time/step_s"] = now - self._began
        self._step.clear()
        self._began = now
        return seconds
