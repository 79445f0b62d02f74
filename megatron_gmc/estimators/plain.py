"""The two ends without a cap: no correction at all, and the whole ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_gmc.estimators.base import TrajectoryEstimator
from megatron_gmc.estimators.records import TrajectoryRatios


@dataclass(frozen=True)
class NoCorrection(TrajectoryEstimator):
    """w_i = 1: the samples are taken for on-policy ones, whatever their lag."""

    name: Literal["none"] = "none"
    needs_group: ClassVar[bool] = False

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
    needs_group: ClassVar[bool] = False

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """ℓ, float64 [N]."""
        return ratios.log_ratio_N
