"""`inspect`: the groups of a trajectory record that stand out, in terminal tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypedDict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_gmc.trajectory_record import NON_FINITE, read_records

TEXT_WIDTH = 32


class Row(TypedDict):
    """One trajectory, as trajectory_record.SCHEMA describes it."""

    step: int
    version: int
    group: int
    member: int
    prompt_id: str
    prompt: str
    response: str
    tokens: list[int]
    mask: list[bool]
    behaviour_log_probs: list[float]
    log_probs: list[float | None]
    versions: list[int]
    reward: float
    advantage: float
    weight: float
    log_ratio: float
    lag: int
    finish_reason: str


@dataclass(frozen=True)
class GroupSummary:
    """A group in one line."""

    rows: list[Row]

    @property
    def log_mass(self) -> float:
        """Logarithm of the group's mass M, the mean of exp ℓ."""
        ratios = [row["log_ratio"] for row in self.rows]
        if any(math.isnan(ratio) for ratio in ratios):
            return math.nan
        top = max(ratios)
        if math.isinf(top):
            return top
        return top + math.log(math.fsum(math.exp(r - top) for r in ratios) / len(ratios))

    @property
    def kept(self) -> float:
        """Mean weight over M: what the method left of the group's gradient."""
        mean = math.fsum(row["weight"] for row in self.rows) / len(self.rows)
        if mean <= 0 or not math.isfinite(self.log_mass):
            return 0.0 if mean == 0 else math.nan
        return math.exp(math.log(mean) - self.log_mass)

    @property
    def largest_weight(self) -> float:
        return max(row["weight"] for row in self.rows)

    @property
    def lag(self) -> int:
        return max(row["lag"] for row in self.rows)


ORDERS: dict[str, tuple[str, Callable[[GroupSummary], float]]] = {
    "largest-weights": ("largest weights", lambda group: -group.largest_weight),
    "most-capped": ("most capped", lambda group: group.kept),
    "oldest": ("oldest", lambda group: -group.lag),
}


def inspect(path: Path, *, orders: Sequence[str], step: int | None, count: int) -> int:
    """Print the `count` groups that come first in each of `orders`; returns the exit code.

    `path` is a run's folder or one Parquet file; of a file that a non-finite step left, all
    trajectories are shown.
    """
    console = Console()
    left = sorted(path.glob(NON_FINITE.format("*"))) if path.is_dir() else []
    for file in left:
        console.print(f"a step that was not finite: megatron-gmc inspect {file}", highlight=False)
    rows: list[Row] = read_records(path, step).to_pylist()
    if path.name.startswith(NON_FINITE.split("{")[0]):
        console.print(_suspects(rows))
        return 0
    groups = list(_groups(rows))
    for order in orders:
        title, key = ORDERS[order]
        console.print(_table(f"{title} of {len(groups)} groups", sorted(groups, key=key)[:count]))
    return 0


def _groups(rows: Sequence[Row]) -> Iterator[GroupSummary]:
    def key(row: Row) -> tuple[int, int]:
        return row["step"], row["group"]

    for _, members in groupby(sorted(rows, key=key), key):
        yield GroupSummary(list(members))


def _table(title: str, groups: Sequence[GroupSummary]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("step", "group", "lag", "M", "kept", "weights", "rewards", "tokens"):
        table.add_column(name, justify="right")
    table.add_column("prompt")
    for group in groups:
        rows, first = group.rows, group.rows[0]
        table.add_row(
            str(first["step"]),
            str(first["group"]),
            str(group.lag),
            _exponential(group.log_mass),
            f"{group.kept:.3g}",
            _span([row["weight"] for row in rows]),
            _span([row["reward"] for row in rows]),
            _span([len(row["tokens"]) for row in rows]),
            printable(first["prompt"]),
        )
    return table


def _suspects(rows: Sequence[Row]) -> Table:
    table = Table(title="the step was stopped before the optimizer", title_justify="left")
    for name in ("group", "member", "lag", "versions", "ℓ", "weight", "advantage", "reward"):
        table.add_column(name, justify="right")
    for name in ("first bad token", "prompt", "response"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            str(row["group"]),
            str(row["member"]),
            str(row["lag"]),
            _span(row["versions"]),
            f"{row['log_ratio']:.3g}",
            f"{row['weight']:.3g}",
            f"{row['advantage']:.3g}",
            f"{row['reward']:.3g}",
            _first_bad_token(row),
            printable(row["prompt"]),
            printable(row["response"]),
        )
    return table


def _first_bad_token(row: Row) -> str:
    both = zip(row["log_probs"], row["behaviour_log_probs"], strict=True)
    for place, (ours, theirs) in enumerate(both):
        if ours is not None and not (math.isfinite(ours) and math.isfinite(theirs)):
            return f"{place} (id {row['tokens'][place]}): learner {ours:.3g}, engine {theirs:.3g}"
    return "none"


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g} – {high:.3g}"


def _exponential(logarithm: float) -> str:
    """exp of a number whose exponential may be too large to hold."""
    if not math.isfinite(logarithm) or abs(logarithm) < 300:
        return f"{math.exp(logarithm):.3g}"
    return f"e^{logarithm:.0f}"


def printable(text: str) -> Text:
    """The beginning of what a model or a data set wrote, with nothing that a terminal obeys."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: TEXT_WIDTH + 1])
    return Text(shown if len(shown) <= TEXT_WIDTH else shown[: TEXT_WIDTH - 1] + "…")
