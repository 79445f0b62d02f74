"""Sums over trajectories and groups, in float64 and in log space."""

from __future__ import annotations

import torch
from torch import Tensor


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


def group_sizes(group_N: Tensor, groups: int) -> Tensor:
    """Number of members of each group, float64 [P]: a whole number's log would be float32."""
    return torch.bincount(group_N, minlength=groups).double()


def log_sum(log_value_N: Tensor, group_N: Tensor, groups: int) -> Tensor:
    """log Σ exp(log_value) over each group, float64 [P]; −inf where every member is −inf."""
    log_value_N = log_value_N.double()
    largest_P = log_value_N.new_full((groups,), -torch.inf)
    largest_P = largest_P.scatter_reduce(0, group_N, log_value_N, "amax")
    # An infinite shift would turn inf − inf into NaN; without one exp gives the right 0 or inf.
    shift_P = torch.where(largest_P.isinf(), 0.0, largest_P)
    scaled_N = (log_value_N - shift_P.gather(0, group_N)).exp_()
    return torch.zeros_like(shift_P).scatter_add(0, group_N, scaled_N).log() + shift_P


def log_mass(log_ratio_N: Tensor, group_N: Tensor, groups: int) -> Tensor:
    """log M of each group, float64 [P]: M is the mean of exp(log_ratio) over the whole group.

    Finite for any finite log-ratios; −inf where every member is −inf; a NaN makes its group's
    mass NaN and no other's.
    """
    return log_sum(log_ratio_N, group_N, groups) - group_sizes(group_N, groups).log()
