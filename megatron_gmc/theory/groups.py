"""Estimators on explicit groups: the plain-tensor side of the exact environments."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gmc.estimators import (
    Estimator,
    TokenEstimator,
    TokenRatios,
    TrajectoryEstimator,
    TrajectoryRatios,
    advantages,
    log_mass,
)


def group_index(groups: int, size: int) -> Tensor:
    """int64 [groups · size]: which group each trajectory of the flattened groups belongs to."""
    return torch.arange(groups).repeat_interleave(size)


def as_ratios(log_ratio_PG: Tensor, advantage_PG: Tensor) -> TrajectoryRatios:
    """Groups of equal size, [P, G], as the record that estimators read."""
    groups, size = log_ratio_PG.shape
    return TrajectoryRatios(
        log_ratio_N=log_ratio_PG.double().reshape(-1),
        group_N=group_index(groups, size),
        advantage_N=advantage_PG.double().reshape(-1),
        tokens_N=torch.ones(groups * size, dtype=torch.int64),
        groups=groups,
    )


def weights(estimator: TrajectoryEstimator, log_ratio_PG: Tensor) -> Tensor:
    """The method's weights for groups of equal size, float64 [P, G]; advantages are all 1."""
    ratios = as_ratios(log_ratio_PG, torch.ones_like(log_ratio_PG))
    return estimator.weights(ratios).reshape(log_ratio_PG.shape)


def masses(log_ratio_PG: Tensor) -> Tensor:
    """Group masses M, float64 [P]."""
    groups, size = log_ratio_PG.shape
    flat_N = log_ratio_PG.double().reshape(-1)
    return log_mass(flat_N, group_index(groups, size), groups).exp()


def leave_one_out(reward_PG: Tensor) -> Tensor:
    """r_i minus the mean of the group's other members, [P, G], in the rewards' precision.

    Groups of one have no other member and keep their reward. Computed here in float64 because
    `estimators.advantages` ends in float32, which is not enough for exact expectations.
    """
    size = reward_PG.shape[1]
    if size == 1:
        return reward_PG
    return (reward_PG - reward_PG.mean(1, keepdim=True)) * (size / (size - 1))


def token_coefficients(
    estimator: Estimator, log_ratio_NT: Tensor, reward_N: Tensor, group_N: Tensor, groups: int
) -> Tensor:
    """What multiplies ∇ log π of each token, float64 [N, T]: any method, leave-one-out advantages.

    log_ratio_NT: float64 [N, T] token log-ratios, every token a loss token.
    """
    trajectories, tokens = log_ratio_NT.shape
    advantage_N = advantages(reward_N, group_N, groups, "leave_one_out")
    if isinstance(estimator, TokenEstimator):
        trajectory_K = group_index(trajectories, tokens)
        record = TokenRatios(log_ratio_NT.reshape(-1), trajectory_K, advantage_N)
        return estimator.coefficients(record).double().reshape(trajectories, tokens)
    whole = TrajectoryRatios(
        log_ratio_N=log_ratio_NT.double().sum(1),
        group_N=group_N,
        advantage_N=advantage_N,
        tokens_N=torch.full((trajectories,), tokens, dtype=torch.int64),
        groups=groups,
    )
    return estimator.coefficients(whole)[:, None].expand(-1, tokens)
