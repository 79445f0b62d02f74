"""A bandit whose expectations over groups are sums over all Kᴳ groups: no sampling, no error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gmc.estimators import TrajectoryEstimator
from megatron_gmc.theory.groups import as_ratios, leave_one_out, masses

LARGEST_ENUMERATION = 2**20
"""Groups that one enumeration may hold: 1 million of size 10 are 80 MB for each quantity."""


@dataclass(frozen=True, eq=False)
class Bandit:
    """Softmax policy and behaviour over K arms with fixed rewards; all float64 [K].

    J = Σ π_k r_k and the score of arm k is e_k − π. Along any unit direction u,
    J'' = Cov_π(r, (u − ū)²), and (u − ū)² ≤ 2: J is ½(max r − min r)-smooth. [PROVEN]
    """

    logits: Tensor
    behaviour_logits: Tensor
    reward: Tensor

    @property
    def policy(self) -> Tensor:
        return self.logits.softmax(0)

    @property
    def behaviour(self) -> Tensor:
        return self.behaviour_logits.softmax(0)

    @property
    def log_ratio(self) -> Tensor:
        """log π_k − log μ_k, float64 [K]."""
        return self.logits.log_softmax(0) - self.behaviour_logits.log_softmax(0)

    @property
    def value(self) -> float:
        """J, the policy's expected reward."""
        return float(self.policy @ self.reward)

    @property
    def gradient(self) -> Tensor:
        """∇J with respect to the logits, float64 [K]."""
        return self.policy * (self.reward - self.policy @ self.reward)

    @property
    def scores(self) -> Tensor:
        """∇ log π_k = e_k − π in row k, float64 [K, K]."""
        return torch.eye(len(self.policy), dtype=torch.float64) - self.policy

    @property
    def chi_square(self) -> float:
        """χ²(π‖μ) = Var ρ under the behaviour policy."""
        return float(self.policy.square() @ self.behaviour.reciprocal()) - 1


@dataclass(frozen=True, eq=False)
class Moments:
    """Exact moments of an estimator's gradient ĝ = (1/G)Σ w_i A_i S_i over all groups."""

    bias: Tensor
    """E ĝ − ∇J, float64 [K]."""
    variance: float
    """E‖ĝ − E ĝ‖²."""
    second_moment: float
    """E‖ĝ‖²."""
    largest: float
    """max ‖ĝ‖ over groups."""
    distance: float
    """E (1/G)Σ|ρ_i − w_i|, the deficit: ‖bias‖ ≤ B × this."""
    weight: float
    """E (1/G)Σ w_i, the retained mass."""

    @property
    def bias_norm(self) -> float:
        return float(self.bias.norm())


def enumerate_groups(arms: int, group_size: int) -> Tensor:
    """Every group, int64 [Kᴳ, G]. Raises ValueError above `LARGEST_ENUMERATION` groups."""
    if arms**group_size > LARGEST_ENUMERATION:
        raise ValueError(
            f"group_size: {arms}^{group_size} groups are more than {LARGEST_ENUMERATION}; "
            f"use a smaller group or fewer arms"
        )
    return torch.cartesian_prod(*[torch.arange(arms)] * group_size).reshape(-1, group_size)


def exact_moments(bandit: Bandit, estimator: TrajectoryEstimator, group_size: int) -> Moments:
    """Moments of the method's gradient with leave-one-out advantages, by enumeration."""
    arm_PG = enumerate_groups(len(bandit.reward), group_size)
    probability_P = bandit.behaviour[arm_PG].prod(1)
    log_ratio_PG = bandit.log_ratio[arm_PG]
    advantage_PG = leave_one_out(bandit.reward[arm_PG])
    ratios = as_ratios(log_ratio_PG, advantage_PG)
    weight_PG = estimator.weights(ratios).reshape(arm_PG.shape)
    coefficient_PG = estimator.coefficients(ratios).reshape(arm_PG.shape)
    gradient_PK = torch.zeros(len(arm_PG), len(bandit.reward), dtype=torch.float64)
    for member in range(group_size):
        gradient_PK += coefficient_PG[:, member, None] * bandit.scores[arm_PG[:, member]]
    gradient_PK /= group_size
    mean_K = probability_P @ gradient_PK
    square_P = gradient_PK.square().sum(1)
    second_moment = float(probability_P @ square_P)
    return Moments(
        bias=mean_K - bandit.gradient,
        variance=second_moment - float(mean_K.square().sum()),
        second_moment=second_moment,
        largest=float(square_P.max().sqrt()),
        distance=float(probability_P @ (log_ratio_PG.exp() - weight_PG).abs().mean(1)),
        weight=float(probability_P @ weight_PG.mean(1)),
    )


def exact_deficit(bandit: Bandit, group_size: int, epsilon: float) -> float:
    """E(M − c)₊ over all groups."""
    arm_PG = enumerate_groups(len(bandit.reward), group_size)
    excess_P = (masses(bandit.log_ratio[arm_PG]) - (1 + epsilon)).clamp(min=0.0)
    return float(bandit.behaviour[arm_PG].prod(1) @ excess_P)
