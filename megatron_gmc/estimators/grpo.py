"""Clipped token ratios: GRPO's surrogate as a weight on each token, and CISPO's bare weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_gmc.estimators.base import (
    TokenEstimator,
    check_above_zero,
    check_clip,
    is_clipped,
)
from megatron_gmc.estimators.records import TokenRatios


@dataclass(frozen=True)
class GRPO(TokenEstimator):
    """w_t = r_t · 1{not clipped}: exactly the gradient of min(rA, clip(r, 1−ε_low, 1+ε_high)A).

    A token is clipped when A > 0 and r > 1 + clip_high, or A < 0 and r < 1 − clip_low. The bounds
    of arXiv 2402.03300 are equal (0.2); arXiv 2503.14476 (DAPO) raises clip_high to 0.28.
    dual_clip (arXiv 1912.09729, there 3): for A < 0 the objective is at least dual_clip · A, so
    that a token with r above it has no gradient either; None leaves that side unbounded.
    """

    name: Literal["grpo"] = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            check_above_zero("dual_clip", self.dual_clip)
            if self.dual_clip <= 1:
                raise ValueError(f"dual_clip must be above 1, got {self.dual_clip:g}")

    def log_weights(self, ratios: TokenRatios) -> Tensor:
        """log r where the token is not clipped, −inf elsewhere; float64 [K]."""
        log_ratio_K, advantage_K = ratios.log_ratio_K.double(), ratios.advantage_K
        clipped_K = is_clipped(log_ratio_K, advantage_K, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            clipped_K |= (advantage_K < 0) & (log_ratio_K > math.log(self.dual_clip))
        return torch.where(clipped_K, -torch.inf, log_ratio_K)


@dataclass(frozen=True)
class CISPO(TokenEstimator):
    """w_t = r_t cut to [weight_min, weight_max], detached: no token loses its gradient.

    arXiv 2506.13585, equations 4 and 5: weight_max is 1 + ε_high there, and ε_max in ScaleRL
    (arXiv 2510.13786) and TRL, whose 5 is the default. The paper sets no lower bound; None.
    """

    name: Literal["cispo"] = "cispo"
    weight_max: float = 5.0
    weight_min: float | None = None

    def __post_init__(self) -> None:
        check_above_zero("weight_max", self.weight_max)
        if self.weight_max < 1:
            raise ValueError(f"weight_max must be at least 1, got {self.weight_max:g}")
        if self.weight_min is not None:
            check_above_zero("weight_min", self.weight_min)
            if self.weight_min > 1:
                raise ValueError(f"weight_min must be at most 1, got {self.weight_min:g}")

    def log_weights(self, ratios: TokenRatios) -> Tensor:
        """log r within the bounds, float64 [K]."""
        low = None if self.weight_min is None else math.log(self.weight_min)
        return ratios.log_ratio_K.double().clamp(min=low, max=math.log(self.weight_max))
