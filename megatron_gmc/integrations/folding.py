"""Advantages that carry a group-level weight, for any framework whose loss is linear in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_gmc.estimators import (
    GEPO,
    GSPO,
    AnyEstimator,
    GMCDifferentiable,
    TrajectoryEstimator,
    TrajectoryRatios,
    ratio_diagnostics,
)

Gather = Callable[[Tensor], tuple[Tensor, int]]
"""This rank's rows → the rows of all ranks in rank order, and where this rank's begin among them.

`gather_over` makes one from a process group.
"""

NOT_A_WEIGHT = (GSPO, GEPO, GMCDifferentiable)
"""Methods of whole trajectories that are no function of log-ratios and groups alone."""


def fold(
    advantages: Tensor,
    log_ratio: Tensor,
    group_ids: Tensor,
    estimator: AnyEstimator,
    all_gather: Gather | None = None,
    *,
    group_size: int | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Advantages times the estimator's weights, and the metrics of the whole batch.

    A detached, non-negative weight of the trajectory multiplies its gradient exactly as a factor of
    its advantage does, in every loss that is linear in the advantage at fixed sign. So the
    framework's loss must not correct for the lag a second time: its own importance correction
    off, its PPO ratio 1 at the parameters that the log-ratios were taken at.

    advantages   float [N], or [N, T] with one value a token
    log_ratio    float32 or float64 [N]: sums over loss tokens of current − behaviour log-prob
                 (`log_ratio_sums`), both at the sampling temperature
    group_ids    integers [N], any values, in any order: equal for trajectories of one prompt
    all_gather   for more than one rank; groups may then lie on several, and each rank gives and
                 gets back its own rows
    group_size   G, where every group must have as many

    Returns the weighted advantages (shape and dtype of `advantages`, exactly 0 where they are 0)
    and metrics with the names of `estimators.diagnostics`, the same on every rank.

    Raises ValueError, on all ranks alike where it takes the gathered rows to see it: shapes or
    kinds that do not fit, a method that is not a weight of the trajectory, a log-ratio that is NaN
    or +inf (a behaviour log-prob is missing), a group that is not of `group_size`. Raises
    OverflowError for a weight beyond the dtype of the advantages.
    """
    method = check_estimator(estimator)
    _check_rows(advantages, log_ratio, group_ids)
    gather = all_gather or _alone
    log_ratio_N, first = gather(log_ratio.detach().double())
    ids_N, _ = gather(group_ids.detach().long())
    _check_log_ratios(log_ratio_N, ids_N)
    ids_P, group_N, size_P = ids_N.unique(return_inverse=True, return_counts=True)
    if group_size is not None:
        _check_sizes(ids_P, size_P, group_size)
    ratios = TrajectoryRatios(
        log_ratio_N,
        group_N,
        # What the methods that are let through do not look at.
        advantage_N=torch.zeros_like(log_ratio_N),
        tokens_N=torch.ones_like(group_N),
        groups=len(ids_P),
    )
    weight_N = method.weights(ratios)
    _check_weights(weight_N.to(advantages.dtype), log_ratio_N, estimator.name)
    own_N = weight_N[first : first + len(advantages)]
    own_N = own_N.view(-1, *[1] * (advantages.ndim - 1)).to(advantages.dtype)
    metrics = ratio_diagnostics(ratios, weight_N, epsilon=estimator.epsilon)
    return advantages * own_N, metrics


def log_ratio_sums(current: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    """ℓ of each trajectory: current − behaviour log-prob summed over loss tokens, float64 [N].

    current, behaviour: float [N, T]; mask: bool or 0/1 [N, T], True at loss tokens. What stands at
    the other positions is never looked at, NaN included.
    """
    assert current.shape == behaviour.shape == mask.shape, (current.shape, behaviour.shape)
    difference = current.detach().double() - behaviour.detach().double()
    return torch.where(mask.bool(), difference, 0.0).sum(-1)


def check_estimator(estimator: AnyEstimator) -> TrajectoryEstimator:
    """The method, where a factor of the advantage can express it; else raises ValueError."""
    if not isinstance(estimator, TrajectoryEstimator) or isinstance(estimator, NOT_A_WEIGHT):
        raise ValueError(
            f"estimator: {estimator.name} is not one weight a trajectory from the log-ratios of "
            "its group, so it cannot be folded into advantages; use gmc, tic_clip, tic_mask, "
            "tis_sequence, mis, snis, is or another of that kind"
        )
    return estimator


def _alone(value_N: Tensor) -> tuple[Tensor, int]:
    return value_N, 0


def _check_rows(advantages: Tensor, log_ratio: Tensor, group_ids: Tensor) -> None:
    if advantages.ndim not in (1, 2) or not advantages.is_floating_point():
        raise ValueError(
            f"advantages must be float [N] or [N, T], got {advantages.dtype} "
            f"{list(advantages.shape)}"
        )
    rows = (len(advantages),)
    if log_ratio.shape != rows or log_ratio.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"log_ratio must be float32 or float64 {list(rows)}, one sum a trajectory, got "
            f"{log_ratio.dtype} {list(log_ratio.shape)}"
        )
    kind = group_ids.dtype
    if group_ids.shape != rows or kind.is_floating_point or kind == torch.bool:
        raise ValueError(
            f"group_ids must be integers {list(rows)}, one a trajectory, got {kind} "
            f"{list(group_ids.shape)}"
        )


def _check_log_ratios(log_ratio_N: Tensor, ids_N: Tensor) -> None:
    bad_N = log_ratio_N.isnan() | (log_ratio_N == torch.inf)
    if bool(bad_N.any()):
        groups = ids_N[bad_N].unique().tolist()
        raise ValueError(
            f"log_ratio: {int(bad_N.sum())} trajectories have a log-ratio that is NaN or +inf "
            f"(groups {_some(groups)}): a behaviour log-prob is missing or not finite"
        )


def _check_sizes(ids_P: Tensor, size_P: Tensor, group_size: int) -> None:
    wrong_P = size_P != group_size
    if bool(wrong_P.any()):
        found = [
            f"{group} has {size}"
            for group, size in zip(ids_P[wrong_P].tolist(), size_P[wrong_P].tolist(), strict=True)
        ]
        raise ValueError(
            f"group_ids: every group must have {group_size} trajectories over all ranks; group "
            f"{_some(found)}"
        )


def _check_weights(weight_N: Tensor, log_ratio_N: Tensor, name: str) -> None:
    if not bool(weight_N.isfinite().all()):
        raise OverflowError(
            f"a weight of {name} exceeds {weight_N.dtype}: the largest log-ratio is "
            f"{float(log_ratio_N.max()):.4g}; use a method with a cap"
        )


def _some(values: list[int] | list[str]) -> str:
    shown = ", ".join(str(value) for value in values[:8])
    return shown if len(values) <= 8 else f"{shown} and {len(values) - 8} more"
