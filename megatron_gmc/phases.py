"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Wall seconds by phase, of the step under way and of the whole run."""

    def __init__(self) -> None:
        self._step: defaultdict[str, float] = defaultdict(float)
        self._began = time.perf_counter()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to `phase`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._step[phase] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call, and `step`, all of them with what lies between."""
        now = time.perf_counter()
        seconds = {f"time/{phase}_s": spent for phase, spent in self._step.items()}
        seconds["time/step_s"] = now - self._began
        self._step.clear()
        self._began = now
        return seconds
