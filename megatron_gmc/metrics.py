"""A run's metrics.jsonl, read back; light, so that commands that only read start at once."""

from __future__ import annotations

import json
from pathlib import Path

Points = list[tuple[int, float]]
"""(step, value) pairs of one metric in step order."""


def read_metrics(path: Path) -> dict[str, Points]:
    """Read a metrics.jsonl: for each metric its (step, value) pairs in step order.

    Where a step stands twice, a resumed run wrote it again, and the later line counts. A last line
    without its end is being written, or was cut off by a kill, and is left out. Raises ValueError
    for any other line that is no JSON object of numbers.
    """
    series: dict[str, dict[int, float]] = {}
    whole = path.read_bytes().rpartition(b"\n")[0].decode("utf-8")
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            entry = json.loads(line)
            step = int(entry.pop("step"))
            for name, value in entry.items():
                series.setdefault(name, {})[step] = float(value)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number} is no record of a step: {error!r}") from None
    return {name: sorted(points.items()) for name, points in series.items()}
