"""Which trajectory goes into which micro-batch of which data-parallel rank.

The plan is a pure function of lengths and groups. Its invariants:

- every trajectory that takes part stands in exactly one micro-batch of exactly one rank;
- every rank has the same number of micro-batches, at least one, some of them possibly empty, and
  the number is a multiple of what an interleaved pipeline needs;
- every micro-batch has at most `token_limit` tokens, padding included;
- without a second pass, all that a weight depends on lies in one micro-batch: the group, or the
  whole batch, unless the estimator looks at one trajectory alone;
- where every group fits into a micro-batch, no group is split, unless weights never look at one;
- no rank has more work than another by more than the largest unit (group or trajectory).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from megatron_gmc.estimators import Scope
from megatron_gmc.learner.pack import Padding

Passes = Literal["auto", "single_pass", "two_pass"]
Unit = tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """`micro_batches[data rank][micro-batch]` holds indexes into the batch's trajectories."""

    micro_batches: tuple[tuple[Unit, ...], ...]
    padding: Padding
    two_pass: bool


@dataclass(frozen=True)
class Limits:
    """What of mesh and model a plan depends on."""

    data_size: int = 1
    padding: Padding = field(default_factory=Padding)
    count_multiple: int = 1
    """What the number of micro-batches is a multiple of."""
    attention_cost: float = 0.0
    """Work of attention for a token and each token before it, over all other work for a token."""

    def work(self, length: int) -> float:
        """Of one trajectory, in units of a token without attention."""
        return length + self.attention_cost * length * (length + 1) / 2


def plan_micro_batches(
    length_N: Tensor,
    group_N: Tensor,
    *,
    limits: Limits,
    token_limit: int,
    scope: Scope,
    passes: Passes,
    take_N: Tensor | None = None,
) -> Plan:
    """Cut a batch into micro-batches.

    `length_N` and `group_N` are int64 [N]; `take_N` bool [N] says which trajectories take part,
    None for all; `scope` is the estimator's: what a trajectory's weight depends on. Raises
    ValueError where a trajectory that takes part is longer than `token_limit`, or `single_pass`
    is asked for and what the weights depend on does not fit.
    """
    lengths: list[int] = length_N.tolist()
    taken = range(len(lengths)) if take_N is None else take_N.nonzero()[:, 0].tolist()
    fill = _Fill(lengths, limits, token_limit)
    fill.check_each_fits(taken)
    groups = _members(group_N, taken)
    whole = all(fill.fits(group) for group in groups)
    if passes == "single_pass" and scope == "group" and not whole:
        raise ValueError(_group_error(max(groups, key=fill.tokens), fill))
    units = groups if whole and scope != "trajectory" else [(i,) for i in taken]
    ranks = [fill.pack(share) for share in _balanced(units, limits.data_size, fill.work)]
    count = max(1, *(len(rank) for rank in ranks))
    count += -count % limits.count_multiple
    even = tuple(tuple(rank + [()] * (count - len(rank))) for rank in ranks)
    together = sum(len(rank) for rank in ranks) <= 1
    if passes == "single_pass" and scope == "batch" and not together:
        raise ValueError(
            f"learner.passes: single_pass needs the whole batch in one micro-batch of one "
            f"data-parallel rank, but it is cut into {count} on {limits.data_size} ranks; raise "
            f"learner.micro_batch_tokens {token_limit} or use two_pass"
        )
    known = {"trajectory": True, "group": whole, "batch": together}[scope]
    two_pass = not known or (passes == "two_pass" and scope != "trajectory")
    return Plan(even, limits.padding, two_pass)


@dataclass(frozen=True)
class _Fill:
    """What fits into a micro-batch, and what it costs."""

    lengths: Sequence[int]
    limits: Limits
    token_limit: int

    def tokens(self, unit: Unit) -> int:
        return self.limits.padding.of_pack([self.lengths[i] for i in unit])

    def fits(self, unit: Unit) -> bool:
        return self.tokens(unit) <= self.token_limit

    def work(self, unit: Unit) -> float:
        return sum(self.limits.work(self.lengths[i]) for i in unit)

    def check_each_fits(self, taken: Sequence[int]) -> None:
        longest = max((self.lengths[i] for i in taken), default=0)
        padded = self.limits.padding.of_pack([longest])
        if padded > self.token_limit:
            on_mesh = f", {padded} on this mesh" if padded > longest else ""
            raise ValueError(
                f"learner.micro_batch_tokens: {self.token_limit} is less than the longest "
                f"trajectory, {longest} tokens{on_mesh}; raise it to {padded} or more"
            )

    def pack(self, units: Sequence[Unit]) -> list[Unit]:
        """Micro-batches that the units fill, each unit whole: the largest first, where they fit."""
        padding = self.limits.padding
        filled: list[Unit] = []
        tokens: list[int] = []
        for unit in sorted(units, key=self.tokens, reverse=True):
            own = sum(padding.of_trajectory(self.lengths[i]) for i in unit)
            room = (
                n for n, used in enumerate(tokens) if padding.up(used + own) <= self.token_limit
            )
            place = next(room, len(filled))
            if place == len(filled):
                filled.append(())
                tokens.append(0)
            filled[place] += unit
            tokens[place] += own
        return filled


def _balanced(units: Sequence[Unit], parts: int, work: Callable[[Unit], float]) -> list[list[Unit]]:
    """Each unit, the one with most work first, to the part with least so far."""
    shares: list[list[Unit]] = [[] for _ in range(parts)]
    loads = [(0.0, part) for part in range(parts)]
    for unit in sorted(units, key=work, reverse=True):
        load, part = heapq.heappop(loads)
        shares[part].append(unit)
        heapq.heappush(loads, (load + work(unit), part))
    return shares


def _members(group_N: Tensor, taken: Sequence[int]) -> list[Unit]:
    members: dict[int, list[int]] = {}
    groups = group_N.tolist()
    for index in taken:
        members.setdefault(groups[index], []).append(index)
    return [tuple(group) for group in members.values()]


def _group_error(group: Unit, fill: _Fill) -> str:
    return (
        f"learner.passes: single_pass needs whole groups in a micro-batch, but a group of "
        f"{len(group)} trajectories takes {fill.tokens(group)} tokens, over "
        f"learner.micro_batch_tokens {fill.token_limit}; raise that limit or use two_pass"
    )
