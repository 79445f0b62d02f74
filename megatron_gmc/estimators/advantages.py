"""Advantages from the rewards of whole groups."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from megatron_gmc.estimators.groups import Groups

AdvantageKind = Literal["leave_one_out", "group_mean", "group_mean_std", "whitened", "none"]

STD_FLOOR = 1e-6
"""δ in (r − mean)/(σ + δ): far below any spread of graded rewards, it only rules out 0/0."""


def advantages(reward_N: Tensor, group_N: Tensor, groups: int, kind: AdvantageKind) -> Tensor:
    """Advantages of the trajectories of whole groups, float32 [N].

    leave_one_out   r_i − mean of the other members; unbiased, off-policy as well
    group_mean      r_i − mean of the group, which is (1 − 1/G) of the above
    group_mean_std  group_mean over (σ + 1e-6), σ the population form (divided by G)
    whitened        group_mean over (σ + 1e-6), σ that of all the batch's group_mean advantages,
                    the population form: one scale for every prompt (arXiv 2501.03262,
                    REINFORCE++-baseline)
    none            r_i itself, for groups of one

    All but none are exactly 0 in a group of equal rewards; all but whitened see no other group, so
    that a NaN reward stays in its own. Computed in float64; `reward_N` is any float
    [N], `group_N` int64 [N], dense in [0, groups), in any order.

    Raises ValueError for a group of one with leave_one_out.
    """
    if kind == "none":
        return reward_N.float()
    layout = Groups.of(group_N, groups)
    size_P = layout.sizes()
    if kind == "leave_one_out" and bool((size_P == 1).any()):
        raise ValueError(
            f"advantage: leave_one_out compares with the other members, and group "
            f"{int((size_P == 1).nonzero()[0])} has one trajectory; use groups of 2 or more"
        )
    size_N = layout.spread(size_P)
    # Advantages do not change with a constant; taken off first, equal rewards leave exact zeros.
    excess_N = layout.add(reward_N.double(), layout.max(-reward_N.double()))
    deviation_N = layout.add(excess_N, -layout.sum(excess_N) / size_P)
    if kind == "leave_one_out":
        return (deviation_N * (size_N / (size_N - 1))).float()
    if kind == "group_mean":
        return deviation_N.float()
    if kind == "whitened":
        return (deviation_N / (deviation_N.square().mean().sqrt() + STD_FLOOR)).float()
    variance_P = layout.sum(deviation_N.square()) / size_P
    return (deviation_N / (layout.spread(variance_P).sqrt() + STD_FLOOR)).float()
