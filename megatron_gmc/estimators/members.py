"""Two other ways to bring a group's mean weight down to the cap: ablations of gmc.

Among all weights of mean at most c they are as close to the ratios in the L1 sense as gmc's, and
each is the best in another sense; gmc alone keeps the ratios' proportions. Both are found by
Newton's method on a piecewise linear function, which ends after finitely many steps because the
set of members that it acts on only shrinks (Michelot 1986 for the projection onto a simplex).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_gmc.estimators.base import Scope, TrajectoryEstimator, check_above_zero
from megatron_gmc.estimators.groups import Groups
from megatron_gmc.estimators.ratios import group_log_mass
from megatron_gmc.estimators.records import TrajectoryRatios


@dataclass(frozen=True)
class WaterFilling(TrajectoryEstimator):
    """w_i = min(ρ_i, κ), κ such that the group's mean weight is c = 1 + ε; ρ_i where M ≤ c.

    The least sum of squared weights among those that lose no more mass than gmc.
    """

    name: Literal["water_filling"] = "water_filling"
    epsilon: float = 0.2
    scope: ClassVar[Scope] = "group"

    def __post_init__(self) -> None:
        check_above_zero("epsilon", self.epsilon)

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """min(ℓ, log κ), float64 [N]."""
        groups, log_ratio_N = ratios.grouping, ratios.log_ratio_N
        level_P = water_level(log_ratio_N, groups, 1 + self.epsilon)
        capped_P = group_log_mass(log_ratio_N, groups) > math.log1p(self.epsilon)
        log_level_P = torch.where(capped_P, level_P.log(), torch.inf)
        return torch.minimum(log_ratio_N, groups.spread(log_level_P))


@dataclass(frozen=True)
class SoftThreshold(TrajectoryEstimator):
    """w_i = (ρ_i − μ)₊, μ such that the group's mean weight is c = 1 + ε; ρ_i where M ≤ c.

    The least sum of squared distances to the ratios: the Euclidean projection on a simplex.
    """

    name: Literal["soft_threshold"] = "soft_threshold"
    epsilon: float = 0.2
    scope: ClassVar[Scope] = "group"

    def __post_init__(self) -> None:
        check_above_zero("epsilon", self.epsilon)

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """log (ρ − μ)₊, float64 [N]."""
        groups, log_ratio_N = ratios.grouping, ratios.log_ratio_N
        projected_N = projection(log_ratio_N, groups, 1 + self.epsilon)
        capped_P = group_log_mass(log_ratio_N, groups) > math.log1p(self.epsilon)
        return torch.where(groups.spread(capped_P), projected_N.log(), log_ratio_N)


def water_level(log_ratio_N: Tensor, groups: Groups, cap: float) -> Tensor:
    """κ with mean of min(ρ, κ) = cap in each group whose mass is above it; float64 [P]."""
    total_P = cap * groups.sizes()
    # κ is at most the total: what is above it is cut in any case, and nothing overflows.
    ratio_N = torch.minimum(log_ratio_N, groups.spread(total_P.log())).exp()
    level_P = torch.full_like(total_P, cap)
    above_N = ratio_N > groups.spread(level_P)
    while True:
        count_P = groups.sum(above_N.double())
        below_P = groups.sum(torch.where(above_N, 0.0, ratio_N))
        next_P = torch.where(count_P > 0, (total_P - below_P) / count_P, level_P)
        level_P = torch.maximum(level_P, next_P)
        still_N = above_N & (ratio_N > groups.spread(level_P))
        if torch.equal(still_N, above_N):
            return level_P
        above_N = still_N


def projection(log_ratio_N: Tensor, groups: Groups, cap: float) -> Tensor:
    """(ρ − μ)₊ with mean cap in each group whose mass is above it; float64 [N].

    Written with each ratio's distance below the largest, since the ratios may overflow:
    ρ_i − μ = t − d_i.
    """
    total_P = cap * groups.sizes()
    largest_P = groups.max(log_ratio_N)
    log_distance_N = groups.add(
        torch.log(-torch.expm1(groups.add(log_ratio_N, -largest_P))), largest_P
    )
    # t is at most the total: what is further below has weight 0 in any case.
    distance_N = torch.minimum(log_distance_N.exp(), groups.spread(total_P))
    height_P = total_P
    kept_N = torch.ones_like(distance_N, dtype=torch.bool)
    while True:
        sum_P = groups.sum(torch.where(kept_N, distance_N, 0.0))
        next_P = (total_P + sum_P) / groups.sum(kept_N.double())
        height_P = torch.minimum(height_P, next_P)
        still_N = kept_N & (distance_N < groups.spread(height_P))
        if torch.equal(still_N, kept_N):
            return (groups.spread(height_P) - distance_N).clamp(min=0.0)
        kept_N = still_N
