"""The two kinds of estimator, and the guards that every method shares."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_gmc.estimators.records import TokenRatios, TrajectoryRatios

Scope = Literal["trajectory", "group", "batch"]
"""What must be known before a weight is: the trajectory itself, its group, or the whole batch."""


class _Method:
    """What both kinds have in common; a method is a frozen dataclass of its parameters."""

    scope: ClassVar[Scope] = "trajectory"
    reads_proximal: ClassVar[bool] = False
    """Whether the policy at the start of the update matters, apart from current and behaviour."""

    # Read by pydantic when a config tree holds the dataclass: an unknown parameter is refused.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    @property
    def epsilon(self) -> float | None:
        """ε of the cap c = 1 + ε; None for a method without one. A parameter replaces this."""
        return None


class TrajectoryEstimator(_Method, ABC):
    """A method with one weight for each trajectory."""

    @abstractmethod
    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """log w, float64 [N]; −inf for a weight of 0. A method implements this alone."""

    def weights(self, ratios: TrajectoryRatios) -> Tensor:
        """Detached weights w, float64 [N]: 0 where the log-ratio is −inf, NaN where it is NaN."""
        with torch.no_grad():
            return _guarded_exp(self.log_weights(ratios), ratios.log_ratio_N)

    def coefficients(self, ratios: TrajectoryRatios) -> Tensor:
        """What multiplies ∇ log π(trajectory) in the ascent direction: w·A, float64 [N]."""
        return times_advantage(self.weights(ratios), ratios.advantage_N)


class TokenEstimator(_Method, ABC):
    """A method with a weight for each loss token."""

    @abstractmethod
    def log_weights(self, ratios: TokenRatios) -> Tensor:
        """log w, float64 [K]; −inf for a weight of 0. A method implements this alone."""

    def weights(self, ratios: TokenRatios) -> Tensor:
        """Detached weights w, float64 [K]: 0 where the log-ratio is −inf, NaN where it is NaN."""
        with torch.no_grad():
            return _guarded_exp(self.log_weights(ratios), ratios.log_ratio_K)

    def coefficients(self, ratios: TokenRatios) -> Tensor:
        """What multiplies ∇ log π(token) in the ascent direction: w·A, float64 [K]."""
        return times_advantage(self.weights(ratios), ratios.advantage_K)


Estimator = TrajectoryEstimator | TokenEstimator


def times_advantage(weight: Tensor, advantage: Tensor) -> Tensor:
    """w·A in float64, exactly 0 where A is 0 even if w is inf; a NaN weight stays NaN."""
    product = weight * advantage.detach().double()
    return torch.where((advantage == 0) & ~weight.isnan(), 0.0, product)


def check_above_zero(field: str, value: float) -> None:
    """Refuse a parameter that is not a finite number above 0; raises ValueError."""
    if not value > 0:
        raise ValueError(f"{field} must be above 0, got {value:g}")
    if value == math.inf:
        raise ValueError(f"{field} must be finite, got {value:g}")


def check_clip(clip_low: float, clip_high: float) -> None:
    """Refuse the widths of a clip to [1 − low, 1 + high] that is none; raises ValueError."""
    check_above_zero("clip_high", clip_high)
    check_above_zero("clip_low", clip_low)
    if clip_low >= 1:
        raise ValueError(f"clip_low must be below 1, got {clip_low:g}")


def is_clipped(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Where the gradient of min(rA, clip(r, 1 − low, 1 + high)A) is 0: bool, elementwise.

    That is A > 0 with r > 1 + high and A < 0 with r < 1 − low: a step that leads further away.
    """
    too_high = (advantage > 0) & (log_ratio > math.log1p(clip_high))
    too_low = (advantage < 0) & (log_ratio < math.log1p(-clip_low))
    return too_high | too_low


def _guarded_exp(log_weight: Tensor, log_ratio: Tensor) -> Tensor:
    # Here and not in each method, so that no method can hide a NaN or revive a ratio of 0.
    weight = log_weight.exp()
    weight.masked_fill_(log_ratio == -torch.inf, 0.0)
    return weight.masked_fill_(log_ratio.isnan(), torch.nan)
