"""Short ways to the records, and what the tests over all methods run on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_gmc.estimators import ESTIMATORS, TokenEstimator, TrajectoryEstimator
from megatron_gmc.estimators.records import TokenRatios, TrajectoryRatios

TRAJECTORY_METHODS = sorted(
    name for name, method in ESTIMATORS.items() if issubclass(method, TrajectoryEstimator)
)
TOKEN_METHODS = sorted(
    name for name, method in ESTIMATORS.items() if issubclass(method, TokenEstimator)
)
BOUNDED_METHODS = ["gmc", "none", "tic_clip", "tic_mask"]
"""Trajectory methods in the class of mean weight at most c."""


def double(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def trajectory_ratios(
    log_ratios: Sequence[float] | Tensor,
    groups: Sequence[int] | None = None,
    advantages: Sequence[float] | Tensor | None = None,
    tokens: Sequence[int] | None = None,
) -> TrajectoryRatios:
    """One group, advantages of 1 and one token each, unless said otherwise."""
    log_ratio_N = log_ratios if isinstance(log_ratios, Tensor) else double(log_ratios)
    n = len(log_ratio_N)
    group_N = torch.tensor(groups if groups is not None else [0] * n)
    return TrajectoryRatios(
        log_ratio_N=log_ratio_N,
        group_N=group_N,
        advantage_N=torch.ones(n) if advantages is None else torch.as_tensor(advantages),
        tokens_N=torch.tensor(tokens if tokens is not None else [1] * n),
        groups=int(group_N.max()) + 1,
    )


def token_ratios(
    log_ratios: Sequence[float] | Tensor,
    trajectories: Sequence[int],
    advantages: Sequence[float],
) -> TokenRatios:
    return TokenRatios(
        log_ratio_K=torch.as_tensor(log_ratios, dtype=torch.float64),
        trajectory_K=torch.tensor(trajectories),
        advantage_N=double(advantages),
    )
