"""Advantages from the rewards of whole groups."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_gmc.estimators.ratios import group_sizes

AdvantageKind = Literal["leave_one_out", "group_mean", "group_mean_std", "none"]

STD_FLOOR = 1e-6
"""δ in (r − mean)/(σ + δ): far below any spread of graded rewards, it only rules out 0/0."""


def advantages(reward_N: Tensor, group_N: Tensor, groups: int, kind: AdvantageKind) -> Tensor:
    """Advantages of the trajectories of whole groups, float32 [N].

    leave_one_out   r_i − mean of the other members; unbiased, off-policy as well
    group_mean      r_i − mean of the group, which is (1 − 1/G) of the above
    group_mean_std  group_mean over (σ + 1e-6), σ the population form (divided by G)
    none            r_i itself, for groups of one

    The first three are exactly 0 in a group of equal rewards, a member of any group sees no other
    group, and a NaN reward stays in its own group. Computed in float64; `reward_N` is any float
    [N], `group_N` int64 [N], dense in [0, groups), in any order.

    Raises ValueError for a group of one with leave_one_out.
    """
    if kind == "none":
        return reward_N.float()
    size_P = group_sizes(group_N, groups)
    if kind == "leave_one_out" and bool((size_P == 1).any()):
        raise ValueError(
            f"advantage: leave_one_out compares with the other members, and group "
            f"{int((size_P == 1).nonzero()[0])} has one trajectory; use groups of 2 or more"
        )
    size_N = size_P[group_N]
    excess_N = _above_smallest(reward_N.double(), group_N, groups)
    deviation_N = excess_N - _group_total(excess_N, group_N, groups) / size_N
    if kind == "leave_one_out":
        return (deviation_N * (size_N / (size_N - 1))).float()
    if kind == "group_mean":
        return deviation_N.float()
    variance_N = _group_total(deviation_N.square(), group_N, groups) / size_N
    return (deviation_N / (variance_N.sqrt() + STD_FLOOR)).float()


def _above_smallest(reward_N: Tensor, group_N: Tensor, groups: int) -> Tensor:
    # Advantages do not change with a constant; taken off first, equal rewards leave exact zeros.
    smallest_P = reward_N.new_full((groups,), torch.inf)
    smallest_P = smallest_P.scatter_reduce(0, group_N, reward_N, "amin")
    return reward_N - smallest_P[group_N]


def _group_total(value_N: Tensor, group_N: Tensor, groups: int) -> Tensor:
    return value_N.new_zeros(groups).scatter_add(0, group_N, value_N)[group_N]
