"""Weights for frameworks that label the rows of a batch, on a driver that has all of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from megatron_gmc.estimators import AnyEstimator
from megatron_gmc.integrations.folding import fold


def row_weights(
    log_ratio_R: Tensor,
    trajectories: Sequence[Hashable],
    groups: Sequence[Hashable],
    used: Sequence[bool],
    estimator: AnyEstimator,
) -> tuple[Tensor, dict[str, float]]:
    """Weight of each row, float64 [R], and the metrics of the batch.

    log_ratio_R: float64 [R], sums over the row's loss tokens. trajectories, groups: labels of each
    row; rows of one trajectory (its turns) have the sum of their log-ratios as its log-ratio, and
    one weight. used: False for padding, which takes no part and gets weight 1.

    Raises ValueError for a trajectory whose rows name two groups, and as `fold` does.
    """
    rows = [row for row, wanted in enumerate(used) if wanted]
    place = {label: n for n, label in enumerate(dict.fromkeys(trajectories[r] for r in rows))}
    number = {label: n for n, label in enumerate(dict.fromkeys(groups[r] for r in rows))}
    trajectory_U = torch.tensor([place[trajectories[row]] for row in rows], dtype=torch.int64)
    group_U = torch.tensor([number[groups[row]] for row in rows], dtype=torch.int64)
    group_N = torch.zeros(len(place), dtype=torch.int64).scatter(0, trajectory_U, group_U)
    if not torch.equal(group_N[trajectory_U], group_U):
        raise ValueError("group ids: the rows of one trajectory name different groups")
    log_ratio_N = torch.zeros(len(place), dtype=torch.float64)
    log_ratio_N = log_ratio_N.scatter_add(0, trajectory_U, log_ratio_R[rows].double().cpu())
    weight_N, metrics = fold(torch.ones_like(log_ratio_N), log_ratio_N, group_N, estimator)
    weight_R = torch.ones(len(used), dtype=torch.float64)
    weight_R[rows] = weight_N[trajectory_U]
    return weight_R.to(log_ratio_R.device), metrics
