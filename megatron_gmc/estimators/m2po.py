"""M2PO: the tokens that push the second moment of the log-ratios too high get no gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_gmc.estimators.base import Scope, TokenEstimator, check_above_zero
from megatron_gmc.estimators.records import TokenRatios


@dataclass(frozen=True)
class M2PO(TokenEstimator):
    """w_t = r_t, and 0 for the harmful tokens with the largest (log r)².

    Harmful are tokens with A > 0 and r > 1, or A < 0 and r < 1, those that a PPO clip looks at;
    over the whole batch, the largest are left out until the mean of (log r)² over the harmful
    ones that stay is at most `second_moment` (arXiv 2510.01161, Algorithm 1, with its 0.04). A
    token left out keeps its place in the denominator. The authors' code widens the resulting clip
    to at least 0.3 and 0.5; the paper does not, and neither does this.
    """

    name: Literal["m2po"] = "m2po"
    second_moment: float = 0.04
    scope: ClassVar[Scope] = "batch"

    def __post_init__(self) -> None:
        check_above_zero("second_moment", self.second_moment)

    def log_weights(self, ratios: TokenRatios) -> Tensor:
        """log r, −inf for what is left out; float64 [K]."""
        log_ratio_K, advantage_K = ratios.log_ratio_K.double(), ratios.advantage_K
        harmful_K = ((advantage_K > 0) & (log_ratio_K > 0)) | (
            (advantage_K < 0) & (log_ratio_K < 0)
        )
        square_K = torch.where(harmful_K, log_ratio_K.square(), torch.inf)
        sorted_K = square_K.sort().values
        counts_K = torch.arange(1, len(sorted_K) + 1, device=sorted_K.device)
        too_much = sorted_K[sorted_K.cumsum(0) / counts_K > self.second_moment]
        # Equal squares go together, so that the order of the tokens does not matter.
        first_out = too_much[0] if len(too_much) else torch.inf
        return torch.where(harmful_K & (square_K >= first_out), -torch.inf, log_ratio_K)
