"""GRPO's clipped surrogate as a weight on each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_gmc.estimators.base import TokenEstimator, check_above_zero
from megatron_gmc.estimators.records import TokenRatios


@dataclass(frozen=True)
class GRPO(TokenEstimator):
    """w_t = r_t · 1{not clipped}: exactly the gradient of min(rA, clip(r, 1−ε_low, 1+ε_high)A).

    A token is clipped when A > 0 and r > 1 + clip_high, or A < 0 and r < 1 − clip_low. The bounds
    of arXiv 2402.03300 are equal (0.2); arXiv 2503.14476 (DAPO) raises clip_high to 0.28.
    """

    name: Literal["grpo"] = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        check_above_zero("clip_high", self.clip_high)
        check_above_zero("clip_low", self.clip_low)
        if self.clip_low >= 1:
            raise ValueError(f"clip_low must be below 1, got {self.clip_low:g}")

    def log_weights(self, ratios: TokenRatios) -> Tensor:
        """log r where the token is not clipped, −inf elsewhere; float64 [K]."""
        log_ratio_K = ratios.log_ratio_K.double()
        advantage_K = ratios.advantage_N[ratios.trajectory_K]
        too_high_K = (advantage_K > 0) & (log_ratio_K > math.log1p(self.clip_high))
        too_low_K = (advantage_K < 0) & (log_ratio_K < math.log1p(-self.clip_low))
        return torch.where(too_high_K | too_low_K, -torch.inf, log_ratio_K)
