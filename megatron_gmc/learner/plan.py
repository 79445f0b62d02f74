"""Which trajectory goes into which micro-batch of which data-parallel rank.

The plan is a pure function of lengths and groups. Its invariants:

- every trajectory stands in exactly one micro-batch of exactly one rank;
- every rank has the same number of micro-batches, some of them possibly empty;
- every micro-batch has at most `token_limit` tokens, padding to `width` included;
- without a second pass, all that a weight depends on lies in one micro-batch: the group, or the
  whole batch, unless the estimator looks at one trajectory alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatron_gmc.estimators import Scope

Passes = Literal["auto", "single_pass", "two_pass"]


@dataclass(frozen=True)
class Plan:
    """`micro_batches[data rank][micro-batch]` holds indexes into the batch's trajectories."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    width: int
    """Tokens that every row is padded to."""
    two_pass: bool

    @property
    def rows(self) -> int:
        """Rows of the fullest micro-batch."""
        return max(len(m) for rank in self.micro_batches for m in rank)


def plan_micro_batches(
    length_N: Tensor,
    group_N: Tensor,
    *,
    data_size: int,
    token_limit: int,
    scope: Scope,
    passes: Passes,
) -> Plan:
    """Cut a batch into micro-batches.

    `length_N` and `group_N` are int64 [N]; `scope` is the estimator's: what a trajectory's
    weight depends on. Raises ValueError where a trajectory is longer than `token_limit`, or
    `single_pass` is asked for and what the weights depend on does not fit.
    """
    width = int(length_N.max())
    rows = token_limit // width
    if rows == 0:
        raise ValueError(
            f"learner.micro_batch_tokens: {token_limit} is less than the longest trajectory, "
            f"{width} tokens; raise it to {width} or more"
        )
    groups = _members(group_N)
    largest = max(len(group) for group in groups)
    whole = largest <= rows
    if passes == "single_pass" and scope == "group" and not whole:
        raise ValueError(
            f"learner.passes: single_pass needs whole groups in a micro-batch, but a group of "
            f"{largest} × {width} tokens is over learner.micro_batch_tokens {token_limit}; raise "
            "that limit or use two_pass"
        )
    units = groups if whole else [(i,) for group in groups for i in group]
    ranks = [_fill(share, rows) for share in _split(units, data_size)]
    count = max(1, *(len(rank) for rank in ranks))
    even = tuple(tuple(rank + [()] * (count - len(rank))) for rank in ranks)
    together = data_size == 1 and count == 1
    if passes == "single_pass" and scope == "batch" and not together:
        raise ValueError(
            f"learner.passes: single_pass needs the whole batch in one micro-batch of one "
            f"data-parallel rank, but it is cut into {count} on {data_size} ranks; raise "
            f"learner.micro_batch_tokens {token_limit} or use two_pass"
        )
    known = {"trajectory": True, "group": whole, "batch": together}[scope]
    two_pass = not known or (passes == "two_pass" and scope != "trajectory")
    return Plan(micro_batches=even, width=width, two_pass=two_pass)


def _members(group_N: Tensor) -> list[tuple[int, ...]]:
    members: dict[int, list[int]] = {}
    for index, group in enumerate(group_N.tolist()):
        members.setdefault(group, []).append(index)
    return [tuple(group) for group in members.values()]


def _split(units: Sequence[tuple[int, ...]], parts: int) -> list[list[tuple[int, ...]]]:
    """Contiguous parts whose numbers of trajectories are as even as whole units allow."""
    total = sum(len(unit) for unit in units)
    shares: list[list[tuple[int, ...]]] = [[] for _ in range(parts)]
    placed = 0
    for unit in units:
        # The middle of the unit decides, so that an uneven unit goes to the nearer part.
        shares[min(parts - 1, int((placed + len(unit) / 2) * parts / total))].append(unit)
        placed += len(unit)
    return shares


def _fill(units: Sequence[tuple[int, ...]], rows: int) -> list[tuple[int, ...]]:
    filled: list[list[int]] = []
    for unit in units:
        if filled and len(filled[-1]) + len(unit) <= rows:
            filled[-1].extend(unit)
        else:
            filled.append(list(unit))
    return [tuple(micro_batch) for micro_batch in filled]
