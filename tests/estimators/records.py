"""Short ways to the records, and what the tests over all methods run on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_gmc.estimators import ESTIMATORS, Estimator, TokenEstimator, TrajectoryEstimator
from megatron_gmc.estimators.records import TokenRatios, TrajectoryRatios

TRAJECTORY_METHODS = sorted(
    name for name, method in ESTIMATORS.items() if issubclass(method, TrajectoryEstimator)
)
TOKEN_METHODS = sorted(
    name for name, method in ESTIMATORS.items() if issubclass(method, TokenEstimator)
)
BOUNDED_METHODS = [
    "gmc", "none", "snis", "soft_threshold", "tic_clip", "tic_mask", "tis_sequence", "mis",
    "water_filling",
]  # fmt: skip
"""Trajectory methods in the class of mean weight at most c, group by group."""
INDEPENDENT_METHODS = [name for name in TRAJECTORY_METHODS if ESTIMATORS[name].scope != "batch"]
"""Trajectory methods whose weights no other group changes."""


def parameters(estimator: Estimator) -> dict[str, Any]:
    """All of a method's parameters, its name apart."""
    values = dataclasses.asdict(estimator)
    del values["name"]
    return values


def with_cap(method: str, cap: float) -> TrajectoryEstimator:
    """The method with its cap, under whichever name, at `cap`; methods without one as they are."""
    parameter = {"epsilon": cap - 1, "cap": cap, "upper": cap}
    names = {field.name for field in dataclasses.fields(ESTIMATORS[method])}
    estimator = ESTIMATORS[method](**{k: v for k, v in parameter.items() if k in names})
    assert isinstance(estimator, TrajectoryEstimator)
    return estimator


def double(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def trajectory_ratios(
    log_ratios: Sequence[float] | Tensor,
    groups: Sequence[int] | None = None,
    advantages: Sequence[float] | Tensor | None = None,
    tokens: Sequence[int] | None = None,
    behaviour: Sequence[float] | None = None,
) -> TrajectoryRatios:
    """One group, advantages of 1, one token each of behaviour log-prob 0, unless said otherwise."""
    log_ratio_N = log_ratios if isinstance(log_ratios, Tensor) else double(log_ratios)
    n = len(log_ratio_N)
    group_N = torch.tensor(groups if groups is not None else [0] * n)
    return TrajectoryRatios(
        log_ratio_N=log_ratio_N,
        group_N=group_N,
        advantage_N=torch.ones(n) if advantages is None else torch.as_tensor(advantages),
        tokens_N=torch.tensor(tokens if tokens is not None else [1] * n),
        groups=int(group_N.max()) + 1,
        behaviour_log_prob_N=double(behaviour if behaviour is not None else [0.0] * n),
    )


def token_ratios(
    log_ratios: Sequence[float] | Tensor,
    trajectories: Sequence[int],
    advantages: Sequence[float],
    proximal: Sequence[float] | None = None,
) -> TokenRatios:
    return TokenRatios(
        log_ratio_K=torch.as_tensor(log_ratios, dtype=torch.float64),
        trajectory_K=torch.tensor(trajectories),
        advantage_N=double(advantages),
        proximal_log_ratio_K=None if proximal is None else double(proximal),
    )
