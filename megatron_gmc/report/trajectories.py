"""The trajectories that a report shows: some whole groups of a run's Parquet record."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from megatron_gmc.errors import ConfigError

Row = dict[str, Any]
"""A row of the Parquet record; its columns are checked by name."""
GroupKey = tuple[int, int]
"""Step and group."""

COLUMNS = (
    "step",
    "version",
    "group",
    "member",
    "prompt_id",
    "prompt",
    "response",
    "tokens",
    "behaviour_log_probs",
    "log_probs",
    "versions",
    "reward",
    "advantage",
    "weight",
    "log_ratio",
    "lag",
    "finish_reason",
)
_SCALARS = ("step", "group", "weight", "log_ratio", "lag")
TOKENS = 60_000
"""Tokens of all trajectories that a report holds by default; about 2 MB of text."""

Number = float | str | None
"""NaN and infinities are text, as JSON has no word for them."""


class ShownTrajectory(TypedDict):
    """`pieces` are the tokens' texts, piece i standing for `spans`[i] tokens; `versions` are
    stretches (version, tokens); `behaviour` and `log_ratios` have one entry a token."""

    member: int
    response: str
    finish_reason: str
    lag: int
    reward: Number
    advantage: Number
    weight: Number
    log_ratio: Number
    pieces: list[str]
    spans: list[int]
    behaviour: list[Number]
    log_ratios: list[Number]
    versions: list[tuple[int, int]]


class ShownGroup(TypedDict):
    step: int
    group: int
    prompt_id: str
    prompt: str
    members: list[ShownTrajectory]


Pieces = Callable[[Sequence[int]], list[tuple[str, int]]]
"""Token ids to pieces of text, each with how many tokens it stands for."""


def chosen_groups(run: Path, *, budget: int, pieces: Pieces | None) -> tuple[list[ShownGroup], int]:
    """(groups to show, how many groups are on record) of the run in `run`.

    Chosen are, in turn, the groups with the largest weights, those capped most (the largest ℓ − log
    w), the oldest, and groups spread evenly over the steps, until the next one would exceed
    `budget` tokens; at least one is shown. Raises ConfigError for a file that is not such a record.
    """
    files = sorted((run / "trajectories").glob("*.parquet"))
    if not files:
        return [], 0
    index = _index(files)
    chosen: list[ShownGroup] = []
    used = 0
    for key in _in_order(index):
        group = _read_group(index[key].file, key, pieces)
        size = sum(len(member["log_ratios"]) for member in group["members"])
        if chosen and used + size > budget:
            break
        used += size
        chosen.append(group)
    return sorted(chosen, key=lambda one: (one["step"], one["group"])), len(index)


class _Indexed:
    """Where a group stands and what it is chosen by."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.weight = self.capped = self.lag = -math.inf

    def add(self, weight: float, log_ratio: float, lag: int) -> None:
        self.weight = max(self.weight, weight)
        kept = math.log(weight) if weight > 0 else -math.inf
        if log_ratio > -math.inf:
            self.capped = max(self.capped, log_ratio - kept)
        self.lag = max(self.lag, lag)


def _index(files: Sequence[Path]) -> dict[GroupKey, _Indexed]:
    index: dict[GroupKey, _Indexed] = {}
    for file in files:
        for row in _read(file, _SCALARS):
            key = (row["step"], row["group"])
            # A resumed run may write a step again; its newer file counts.
            if key not in index or index[key].file != file:
                index[key] = _Indexed(file)
            index[key].add(row["weight"], row["log_ratio"], row["lag"])
    return index


def _in_order(index: dict[GroupKey, _Indexed]) -> Iterable[GroupKey]:
    """Every group once, the ones most worth a look first."""
    by_step = sorted(index)
    # Halving the gaps again and again: any beginning of this order is spread over the run.
    spread = [by_step[place] for place in _bit_reversed(len(by_step))]
    orders = [
        sorted(index, key=lambda key: -index[key].weight),
        sorted(index, key=lambda key: -index[key].capped),
        sorted(index, key=lambda key: -index[key].lag),
        spread,
    ]
    return dict.fromkeys(key for turn in zip(*orders, strict=True) for key in turn)


def _bit_reversed(count: int) -> list[int]:
    bits = max(1, (count - 1).bit_length())
    places = (int(f"{n:0{bits}b}"[::-1], 2) for n in range(1 << bits))
    return [place for place in places if place < count]


def _read(file: Path, columns: Sequence[str], only: GroupKey | None = None) -> list[Row]:
    """The rows of a file, or those of one group."""
    import pyarrow
    from pyarrow import parquet

    rows = None if only is None else [("step", "=", only[0]), ("group", "=", only[1])]
    try:
        names = parquet.read_schema(file).names
        missing = [name for name in COLUMNS if name not in names]
        if missing:
            raise ConfigError(f"{file} is no record of trajectories: no column {missing[0]}")
        table = parquet.read_table(file, columns=list(columns), filters=rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file} is no readable Parquet file: {error}") from None
    found: list[Row] = table.to_pylist()
    return found


def _read_group(file: Path, key: GroupKey, pieces: Pieces | None) -> ShownGroup:
    rows = sorted(_read(file, COLUMNS, key), key=lambda row: row["member"])
    return {
        "step": key[0],
        "group": key[1],
        "prompt_id": str(rows[0]["prompt_id"]),
        "prompt": rows[0]["prompt"],
        "members": [_member(row, pieces) for row in rows],
    }


def _member(row: Row, pieces: Pieces | None) -> ShownTrajectory:
    tokens = row["tokens"]
    behaviour = np.asarray(row["behaviour_log_probs"], dtype=np.float64)
    current = np.asarray(row["log_probs"], dtype=np.float64)
    texts = pieces(tokens) if pieces else [(f"[{token}]", 1) for token in tokens]
    return {
        "member": row["member"],
        "response": row["response"],
        "finish_reason": row["finish_reason"],
        "lag": row["lag"],
        "reward": shown(row["reward"]),
        "advantage": shown(row["advantage"]),
        "weight": shown(row["weight"]),
        "log_ratio": shown(row["log_ratio"]),
        "pieces": [text for text, _ in texts],
        "spans": [count for _, count in texts],
        "behaviour": [shown(value) for value in behaviour.tolist()],
        "log_ratios": [shown(value) for value in (current - behaviour).tolist()],
        "versions": [
            (version, len(list(tokens))) for version, tokens in itertools.groupby(row["versions"])
        ],
    }


def shown(value: float | None) -> float | str | None:
    """A number in four digits, or as text where JSON has no word for it."""
    if value is None:
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)
