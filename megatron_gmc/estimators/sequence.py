"""Truncation and masking of a trajectory's whole ratio, as engine/learner corrections have them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_gmc.estimators.base import TrajectoryEstimator, check_above_zero
from megatron_gmc.estimators.records import TrajectoryRatios


@dataclass(frozen=True)
class TISSequence(TrajectoryEstimator):
    """w_i = min(ρ_i, cap), detached: truncated importance sampling of the sequence.

    verl's rollout correction calls it seq-TIS without a PPO clip (docs/algo/rollout_corr_math,
    3.2.2; cap 2, to 10). With cap = 1 + ε it is TIC-clip.
    """

    name: Literal["tis_sequence"] = "tis_sequence"
    cap: float = 2.0

    def __post_init__(self) -> None:
        check_above_zero("cap", self.cap)
        if self.cap < 1:
            raise ValueError(f"cap must be at least 1, got {self.cap:g}")

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """min(ℓ, log cap), float64 [N]."""
        return ratios.log_ratio_N.clamp(max=math.log(self.cap))


@dataclass(frozen=True)
class MIS(TrajectoryEstimator):
    """w_i = ρ_i · 1{lower ≤ ρ_i ≤ upper}: masked importance sampling of the sequence.

    Upper bound 2 as in TRL's and verl's sequence mask; no lower one unless given. A rejected
    trajectory keeps its place in the denominator. With upper = 1 + ε and no lower bound it is
    TIC-mask.
    """

    name: Literal["mis"] = "mis"
    upper: float = 2.0
    lower: float | None = None

    def __post_init__(self) -> None:
        check_bounds(self.lower, self.upper)

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """ℓ within the bounds, −inf outside; float64 [N]."""
        return masked(ratios.log_ratio_N, self.lower, self.upper)


def check_bounds(lower: float | None, upper: float) -> None:
    """Refuse an interval of ratios that does not hold 1; raises ValueError."""
    check_above_zero("upper", upper)
    if upper < 1:
        raise ValueError(f"upper must be at least 1, got {upper:g}")
    if lower is not None:
        check_above_zero("lower", lower)
        if lower > 1:
            raise ValueError(f"lower must be at most 1, got {lower:g}")


def masked(log_ratio: Tensor, lower: float | None, upper: float) -> Tensor:
    """The log-ratio where the ratio is within the bounds, −inf outside."""
    outside = log_ratio > math.log(upper)
    if lower is not None:
        outside |= log_ratio < math.log(lower)
    return torch.where(outside, -torch.inf, log_ratio)
