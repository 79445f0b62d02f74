"""Length-normalised ratios: GSPO and GEPO.

Both have the gradient (1/G) Σ s_i A_i (1/|y_i|) Σ_t ∇ log π_t with s_i a ratio of geometric means.
The weight here is s_i; the 1/|y_i| is objective.aggregation trajectory_mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_gmc.estimators.base import Scope, TrajectoryEstimator, check_clip, is_clipped
from megatron_gmc.estimators.ratios import log_sum
from megatron_gmc.estimators.records import TrajectoryRatios


@dataclass(frozen=True)
class GSPO(TrajectoryEstimator):
    """w_i = s_i · 1{not clipped}, s_i = ρ_i^(1/|y_i|), |y_i| the loss tokens (arXiv 2507.18071).

    The gradient of min(sA, clip(s, 1 − low, 1 + high)A), with the paper's widths 3e-4 and 4e-4.
    """

    name: Literal["gspo"] = "gspo"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """log s where the trajectory is not clipped, −inf elsewhere; float64 [N]."""
        log_ratio_N = ratios.log_ratio_N / ratios.tokens_N.clamp(min=1)
        clipped_N = is_clipped(log_ratio_N, ratios.advantage_N, self.clip_low, self.clip_high)
        return torch.where(clipped_N, -torch.inf, log_ratio_N)


@dataclass(frozen=True)
class GEPO(TrajectoryEstimator):
    """w_i = s_i · 1{not clipped}, s_i = p_i / (Σ_j q_j² / Σ_j q_j), the sums over the group.

    p and q are the geometric means over a response's loss tokens of the current and the behaviour
    probabilities: group expectation weights (arXiv 2508.17850, Listing 1; the geometric means and
    the clip, at TRL's 0.2, as in the authors' trainer, HeteroRL_GEPO). At lag 0 the weights are
    not 1 but p_i over the group's expectation of p, unlike every other method's here.
    """

    name: Literal["gepo"] = "gepo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    scope: ClassVar[Scope] = "group"

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """log s where the trajectory is not clipped, −inf elsewhere; float64 [N]."""
        assert ratios.behaviour_log_prob_N is not None, "gepo looks at the behaviour log-probs"
        groups, tokens_N = ratios.grouping, ratios.tokens_N.clamp(min=1)
        log_q_N = ratios.behaviour_log_prob_N / tokens_N
        log_p_N = log_q_N + ratios.log_ratio_N / tokens_N
        log_expected_P = log_sum(2 * log_q_N, groups) - log_sum(log_q_N, groups)
        log_ratio_N = groups.add(log_p_N, -log_expected_P)
        clipped_N = is_clipped(log_ratio_N, ratios.advantage_N, self.clip_low, self.clip_high)
        return torch.where(clipped_N, -torch.inf, log_ratio_N)
