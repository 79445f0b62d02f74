"""How trajectories of any length lie one after another in a pack, and who holds which tokens.

Pure: lengths in, lengths and row numbers out. A pack is what one forward holds: one row of tokens,
whole trajectories one after another. Context ranks share every trajectory: it is cut into
2 · ranks parts of equal length, and rank r takes parts r and 2 · ranks − 1 − r, so that under a
causal mask every rank has the same work (transformer-engine's split too).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Padding:
    """What lengths are rounded up to, by tokens that come after a trajectory's own."""

    trajectory: int = 1
    """Every trajectory's length is a multiple of this."""
    pack: int = 1
    """Every pack's length is a multiple of this, itself a multiple of `trajectory`."""

    @classmethod
    def of(cls, *, tensor: int, context: int, sequence_parallel: bool) -> Padding:
        """No more than a mesh needs: context ranks take two equal parts of each trajectory, and
        with sequence parallelism tensor ranks take equal parts of what is then local."""
        trajectory = 2 * context if context > 1 else 1
        pack = trajectory
        while sequence_parallel and pack % (context * tensor):
            pack += trajectory
        return cls(trajectory, pack)

    def of_trajectory(self, length: int) -> int:
        """The tokens that a trajectory of `length` takes."""
        return _up(length, self.trajectory)

    def up(self, tokens: int) -> int:
        """The length of a pack whose padded trajectories take `tokens`, at least one token."""
        return _up(max(1, tokens), self.pack)

    def of_pack(self, lengths: Sequence[int]) -> int:
        """The length of a pack of trajectories of `lengths`."""
        return self.up(sum(self.of_trajectory(length) for length in lengths))

    def padded(self, lengths: Sequence[int]) -> list[int]:
        """What every trajectory of a pack takes; a pack without any is one of padding alone."""
        padded = [self.of_trajectory(length) for length in lengths] or [self.pack]
        padded[0] += self.up(sum(padded)) - sum(padded)
        return padded


def context_rows(padded: Sequence[int], size: int, rank: int) -> Tensor:
    """The rows of a pack that context rank `rank` of `size` holds, in its order; int64.

    `padded` are the lengths of the pack's trajectories, each a multiple of 2 · size.
    """
    if size == 1:
        return torch.arange(sum(padded))
    rows, start = [], 0
    for length in padded:
        assert length % (2 * size) == 0, (length, size)
        part = length // (2 * size)
        for place in (rank, 2 * size - 1 - rank):
            rows.append(torch.arange(start + place * part, start + (place + 1) * part))
        start += length
    return torch.cat(rows)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
