"""Trajectory-wise capping (TIC-GRPO, arXiv 2508.02833), in the two forms that others mix up.

Neither is the paper's min(ρA, min(ρ, c)A): its weight for A < 0 is ρ, which no cap bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_gmc.estimators.base import TrajectoryEstimator, check_above_zero
from megatron_gmc.estimators.records import TrajectoryRatios


@dataclass(frozen=True)
class TICClip(TrajectoryEstimator):
    """w_i = min(ρ_i, c), detached, c = 1 + ε: each trajectory is capped by itself."""

    name: Literal["tic_clip"] = "tic_clip"
    epsilon: float = 0.2

    def __post_init__(self) -> None:
        check_above_zero("epsilon", self.epsilon)

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """min(ℓ, log c), float64 [N]."""
        return ratios.log_ratio_N.clamp(max=math.log1p(self.epsilon))


@dataclass(frozen=True)
class TICMask(TrajectoryEstimator):
    """w_i = ρ_i · 1{ρ_i ≤ c}, c = 1 + ε: the gradient of min(ρ, c)·A.

    A rejected trajectory keeps its place in the denominator, so the others' gradient is unchanged.
    """

    name: Literal["tic_mask"] = "tic_mask"
    epsilon: float = 0.2

    def __post_init__(self) -> None:
        check_above_zero("epsilon", self.epsilon)

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """ℓ where it is at most log c, −inf above; float64 [N]."""
        above_N = ratios.log_ratio_N > math.log1p(self.epsilon)
        return torch.where(above_N, -torch.inf, ratios.log_ratio_N)
