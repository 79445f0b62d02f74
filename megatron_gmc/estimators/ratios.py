"""Sums over trajectories and groups, in float64 and in log space."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gmc.estimators.groups import Groups


def trajectory_sums(value_K: Tensor, trajectory_K: Tensor, trajectories: int) -> Tensor:
    """Sum of each trajectory's token values, float64 [N]; 0 for a trajectory without a token.

    `value_K` holds loss tokens alone: the mask selects before this call and never multiplies, so
    a masked −inf or NaN cannot reach the sum.
    """
    sums_N = torch.zeros(trajectories, dtype=torch.float64, device=value_K.device)
    return sums_N.scatter_add(0, trajectory_K, value_K.double())


def trajectory_means(value_K: Tensor, trajectory_K: Tensor, trajectories: int) -> Tensor:
    """Mean of each trajectory's token values, float64 [N].

    For token weights. A trajectory without a token has the empty product, 1, as its ratio, and
    gets 1 here as well.
    """
    tokens_N = torch.bincount(trajectory_K, minlength=trajectories)
    mean_N = trajectory_sums(value_K, trajectory_K, trajectories) / tokens_N
    return torch.where(tokens_N > 0, mean_N, 1.0)


def k3_sums(log_ratio_K: Tensor, trajectory_K: Tensor, trajectories: int) -> Tensor:
    """Each trajectory's sum of exp(d) − 1 − d, d = current − behaviour log-prob; float64 [N].

    The mean over sampled tokens estimates KL(behaviour ‖ current), every term at least 0
    (Schulman, "Approximating KL divergence", 2020, estimator k3).
    """
    log_ratio_K = log_ratio_K.detach().double()
    return trajectory_sums(torch.expm1(log_ratio_K) - log_ratio_K, trajectory_K, trajectories)


def reference_k3(log_prob_K: Tensor, reference_log_prob_K: Tensor) -> Tensor:
    """exp(d) − 1 − d of each token, d = reference − current log-prob; differentiable, [K].

    At samples of the current policy its mean estimates KL(current ‖ reference), every term at
    least 0 (Schulman 2020, estimator k3); samples of another policy need their ratio as a weight.
    With the weight held fixed its gradient is that of KL(reference ‖ current).
    """
    difference_K = reference_log_prob_K.detach() - log_prob_K
    return torch.expm1(difference_K) - difference_K


def log_sum(log_value_N: Tensor, groups: Groups) -> Tensor:
    """log Σ exp(log_value) over each group, float64 [P]; −inf where every member is −inf."""
    scaled_N, shift_P = groups.shifted_exp(log_value_N.double())
    return groups.sum(scaled_N).log() + shift_P


def log_mass(log_ratio_N: Tensor, group_N: Tensor, groups: int) -> Tensor:
    """log M of each group, float64 [P]: M is the mean of exp(log_ratio) over the whole group.

    Finite for any finite log-ratios; −inf where every member is −inf; a NaN makes its group's
    mass NaN and no other's.
    """
    return group_log_mass(log_ratio_N, Groups.of(group_N, groups))


def group_log_mass(log_ratio_N: Tensor, groups: Groups) -> Tensor:
    """`log_mass` for groups whose layout is known."""
    return log_sum(log_ratio_N, groups) - groups.sizes().log()
