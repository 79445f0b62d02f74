"""Group-mass capping (arXiv 2610.01896): a group's ratios shrink together, never one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from megatron_gmc.estimators.base import TrajectoryEstimator, check_above_zero
from megatron_gmc.estimators.ratios import log_mass
from megatron_gmc.estimators.records import TrajectoryRatios


@dataclass(frozen=True)
class GMC(TrajectoryEstimator):
    """w_i = ρ_i · min(1, c/M), c = 1 + ε, M the mean of ρ over the group.

    M ≤ c leaves plain importance sampling; above it the group's mean weight is c. No weight
    exceeds c times the group's size. A group of one is TIC-clip.
    """

    name: Literal["gmc"] = "gmc"
    epsilon: float = 0.2
    needs_group: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_above_zero("epsilon", self.epsilon)

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """ℓ + min(0, log c − log M): finite for any finite ℓ, float64 [N]."""
        log_mass_P = log_mass(ratios.log_ratio_N, ratios.group_N, ratios.groups)
        log_shrink_P = (math.log1p(self.epsilon) - log_mass_P).clamp(max=0.0)
        return ratios.log_ratio_N + log_shrink_P.gather(0, ratios.group_N)
