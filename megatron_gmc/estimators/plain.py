"""No cap: no correction at all, the whole ratio, and the ratio normalised over the group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_gmc.estimators.base import Scope, TrajectoryEstimator
from megatron_gmc.estimators.ratios import group_log_mass
from megatron_gmc.estimators.records import TrajectoryRatios


@dataclass(frozen=True)
class NoCorrection(TrajectoryEstimator):
    """w_i = 1: the samples are taken for on-policy ones, whatever their lag."""

    name: Literal["none"] = "none"

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """0 for each trajectory, float64 [N]."""
        return torch.zeros_like(ratios.log_ratio_N)


@dataclass(frozen=True)
class PlainIS(TrajectoryEstimator):
    """w_i = ρ_i: unbiased with a leave-one-out baseline, and unbounded.

    Beyond ℓ ≈ 709 the weight itself leaves float64 and is inf. That is not clamped: a loss with
    it is not finite, and the learner stops the step and names the trajectory.
    """

    name: Literal["is"] = "is"

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """ℓ, float64 [N]."""
        return ratios.log_ratio_N


@dataclass(frozen=True)
class SNIS(TrajectoryEstimator):
    """w_i = ρ_i/M: self-normalised importance sampling, M the mean of ρ over the group.

    A group's mean weight is 1 whatever its mass: one with M far below 1 is blown up. Biased by
    O(1/G). A classical estimator; see A. B. Owen, "Monte Carlo theory, methods and examples",
    section 9.2.
    """

    name: Literal["snis"] = "snis"
    scope: ClassVar[Scope] = "group"

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """ℓ − log M: finite for any finite ℓ, float64 [N]."""
        groups = ratios.grouping
        return groups.add(ratios.log_ratio_N, -group_log_mass(ratios.log_ratio_N, groups))
