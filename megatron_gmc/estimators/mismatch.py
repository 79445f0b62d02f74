"""A token factor for what lies between the engine's log-probs and the learner's, off by default.

With k = proximal/behaviour and u = current/proximal of a token, the proximal policy being the
learner's own at the start of the update, a trajectory method then forms its weight W from
ℓ = Σ log u in the place of Σ log(current/behaviour), and the gradient is Σ_t W · f(k_t) · A ·
∇ log π_t.
At lag 0 the proximal policy is the one that sampled, so that k is engine against learner and
nothing else, and u is what the steps on the batch have changed. At a larger lag k also holds what
changed while the samples waited, and f then truncates or masks that too, token by token. With one
optimizer step a batch u = 1, and of the two only f(k) is left.

f is detached. A bad token keeps its place in every denominator and every ℓ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from megatron_gmc.estimators.base import check_above_zero
from megatron_gmc.estimators.sequence import check_bounds, masked


@dataclass(frozen=True)
class TruncatedMismatch:
    """f(k) = min(k, cap): truncated importance sampling of each token.

    Cap 2 as in TRL, after "Your efficient RL framework secretly brings you off-policy RL training"
    (fengyao.notion.site).
    """

    name: Literal["truncate"] = "truncate"
    cap: float = 2.0

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        check_above_zero("cap", self.cap)
        if self.cap < 1:
            raise ValueError(f"cap must be at least 1, got {self.cap:g}")

    def factors(self, log_mismatch_K: Tensor) -> Tensor:
        """f from log k, float64 [K]; NaN where it is NaN."""
        return log_mismatch_K.detach().double().clamp(max=math.log(self.cap)).exp()


@dataclass(frozen=True)
class MaskedMismatch:
    """f(k) = k · 1{lower ≤ k ≤ upper}: a token outside gets no gradient (arXiv 2510.18855)."""

    name: Literal["mask"] = "mask"
    lower: float = 0.5
    upper: float = 5.0

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        check_bounds(self.lower, self.upper)

    def factors(self, log_mismatch_K: Tensor) -> Tensor:
        """f from log k, float64 [K]; NaN where it is NaN."""
        return masked(log_mismatch_K.detach().double(), self.lower, self.upper).exp()


AnyMismatch = TruncatedMismatch | MaskedMismatch
"""The union that a config field discriminates by `name`."""
