"""Sums and maxima over the groups of a batch, without a loop over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Groups:
    """Which trajectory belongs to which group, and how to reduce over a group.

    Groups of one size that lie one behind the other are reduced as the rows of a matrix, several
    times as fast as by index; `of` finds out which it is.
    """

    index_N: Tensor
    """int64 [N], dense in [0, count)."""
    count: int
    row: int | None
    """Size of each group where group p is the trajectories p·row … (p+1)·row − 1, else None."""

    @classmethod
    def of(cls, index_N: Tensor, count: int) -> Groups:
        """Look at the layout once; costs a pass over the indexes."""
        row = len(index_N) // count if count and len(index_N) % count == 0 else None
        if row is not None:
            rows_N = torch.arange(count, device=index_N.device).repeat_interleave(row)
            row = row if torch.equal(index_N, rows_N) else None
        return cls(index_N, count, row)

    def sizes(self) -> Tensor:
        """Members of each group, float64 [P]: a whole number's log would be float32."""
        if self.row is not None:
            return torch.full(
                (self.count,), self.row, dtype=torch.float64, device=self.index_N.device
            )
        return torch.bincount(self.index_N, minlength=self.count).double()

    def sum(self, value_N: Tensor) -> Tensor:
        """Sum over each group, [P]."""
        if self.row is not None:
            return value_N.view(self.count, self.row).sum(1)
        return value_N.new_zeros(self.count).scatter_add(0, self.index_N, value_N)

    def max(self, value_N: Tensor) -> Tensor:
        """Largest value of each group, [P]; NaN where it has one."""
        if self.row is not None:
            return value_N.view(self.count, self.row).amax(1)
        lowest_P = value_N.new_full((self.count,), -torch.inf)
        return lowest_P.scatter_reduce(0, self.index_N, value_N, "amax")

    def spread(self, value_P: Tensor) -> Tensor:
        """Each trajectory's value of its group, [N]."""
        if self.row is not None:
            return value_P.repeat_interleave(self.row)
        return value_P[self.index_N]

    def add(self, value_N: Tensor, value_P: Tensor) -> Tensor:
        """Each trajectory's value plus its group's, [N]."""
        if self.row is not None:
            return (value_N.view(self.count, self.row) + value_P[:, None]).view(-1)
        return value_N + value_P[self.index_N]

    def scale_(self, value_N: Tensor, factor_P: Tensor) -> None:
        """Multiply each trajectory's value by its group's factor, in place."""
        if self.row is not None:
            value_N.view(self.count, self.row).mul_(factor_P[:, None])
        else:
            value_N.mul_(factor_P[self.index_N])

    def shifted_exp(self, log_value_N: Tensor) -> tuple[Tensor, Tensor]:
        """exp(log_value − shift) [N] and the shift [P], each group's largest where that is finite.

        Finite for any finite log_value.
        """
        largest_P = self.max(log_value_N)
        # An infinite shift would turn inf − inf into NaN; without one exp gives the right 0 or inf.
        shift_P = torch.where(largest_P.isinf(), 0.0, largest_P)
        return self.add(log_value_N, -shift_P).exp_(), shift_P
