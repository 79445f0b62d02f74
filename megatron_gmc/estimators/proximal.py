"""PPO around a proximal policy, with a token factor for what lies between it and the behaviour.

With u = current/proximal and k = proximal/behaviour all three have the gradient weight f(k) · u ·
1{u not clipped}; they differ in f. With one optimizer step a batch u is 1 and nothing is clipped.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_gmc.estimators.base import (
    TokenEstimator,
    check_above_zero,
    check_clip,
    is_clipped,
)
from megatron_gmc.estimators.records import TokenRatios
from megatron_gmc.estimators.sequence import check_bounds, masked


@dataclass(frozen=True)
class _ProximalPPO(TokenEstimator):
    """f(k) · ∇ min(uA, clip(u, 1 − clip_low, 1 + clip_high)A)."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    reads_proximal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)

    @abstractmethod
    def log_factor(self, staleness_K: Tensor) -> Tensor:
        """log f(k) from log k, float64 [K]."""

    def log_weights(self, ratios: TokenRatios) -> Tensor:
        """log f(k) + log u where u is not clipped, −inf elsewhere; float64 [K]."""
        staleness_K, update_K = ratios.staleness_and_update()
        clipped_K = is_clipped(update_K, ratios.advantage_K, self.clip_low, self.clip_high)
        return torch.where(clipped_K, -torch.inf, self.log_factor(staleness_K) + update_K)


@dataclass(frozen=True)
class TISToken(_ProximalPPO):
    """f(k) = min(k, cap): truncated importance sampling of each token.

    "Your efficient RL framework secretly brings you off-policy RL training" (fengyao.notion.site),
    cap 2 as in TRL.
    """

    name: Literal["tis_token"] = "tis_token"
    cap: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero("cap", self.cap)
        if self.cap < 1:
            raise ValueError(f"cap must be at least 1, got {self.cap:g}")

    def log_factor(self, staleness_K: Tensor) -> Tensor:
        """min(log k, log cap)."""
        return staleness_K.clamp(max=math.log(self.cap))


@dataclass(frozen=True)
class IcePop(_ProximalPPO):
    """f(k) = k · 1{lower ≤ k ≤ upper}: a token outside gets no gradient (arXiv 2510.18855).

    Bounds 0.5 and 5; open-instruct has [1/5, 5], GLM-5 [0.5, 2].
    """

    name: Literal["icepop"] = "icepop"
    lower: float = 0.5
    upper: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self.lower, self.upper)

    def log_factor(self, staleness_K: Tensor) -> Tensor:
        """log k within the bounds, −inf outside."""
        return masked(staleness_K, self.lower, self.upper)


@dataclass(frozen=True)
class DecoupledPPO(_ProximalPPO):
    """f(k) = k, unbounded (arXiv 2505.24298, equations 3 to 5)."""

    name: Literal["decoupled_ppo"] = "decoupled_ppo"

    def log_factor(self, staleness_K: Tensor) -> Tensor:
        """log k."""
        return staleness_K
