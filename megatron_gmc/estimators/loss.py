"""The policy loss of a micro-batch, in REINFORCE form with fixed coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AggregationKind = Literal["token_sum", "trajectory_mean", "token_mean"]


@dataclass(frozen=True)
class Denominator:
    """Counts of the *whole* batch over all ranks and micro-batches, rejected samples included."""

    trajectories: int
    tokens: int
    """Loss tokens."""

    def of(self, aggregation: AggregationKind) -> int:
        """What the sum of token terms is divided by."""
        return self.tokens if aggregation == "token_mean" else self.trajectories


def policy_loss(
    log_prob_K: Tensor,
    coefficient_K: Tensor,
    trajectory_K: Tensor,
    tokens_N: Tensor,
    denominator: Denominator,
    aggregation: AggregationKind,
) -> Tensor:
    """−Σ_k coefficient_k · log π(token k) / denominator, a scalar of log_prob_K's dtype.

    Added up over micro-batches and ranks (each token once) it is the batch's loss, so nothing may
    average it again.

    token_sum        Σ over tokens, over the number of trajectories; the policy gradient itself
    trajectory_mean  each trajectory's sum over its own token count, over that number
    token_mean       Σ over tokens, over the number of loss tokens

    log_prob_K float32 or float64 [K], current log-probs of the loss tokens, with the graph;
    coefficient_K float64 [K], weight × advantage (`Estimator.coefficients`, those of a trajectory
    method indexed by trajectory_K); trajectory_K int64 [K] in [0, N); tokens_N int64 [N], loss
    tokens of the whole trajectory, even where this rank holds a part of it.

    A coefficient of 0 contributes exactly 0, also next to a log-prob of −inf. NaN is never
    selected away: the loss is not finite wherever a coefficient or a log-prob with a coefficient
    is not. No token at all gives 0, attached to log_prob_K's graph.
    """
    total = weighted_sum(
        log_prob_K, coefficient_K, trajectory_K, tokens_N, denominator, aggregation
    )
    return -total


def weighted_sum(
    value_K: Tensor,
    weight_K: Tensor,
    trajectory_K: Tensor,
    tokens_N: Tensor,
    denominator: Denominator,
    aggregation: AggregationKind,
) -> Tensor:
    """Σ_k weight_k · value_k / denominator: how any term of the loss is added up over tokens.

    Shapes, dtypes and what becomes of zeros and NaN as in `policy_loss`, with a value in the place
    of the log-prob and a weight, held fixed, in that of the coefficient.
    """
    assert value_K.dtype in (torch.float32, torch.float64), value_K.dtype
    assert weight_K.shape == value_K.shape, (weight_K.shape, value_K.shape)
    scale_K = weight_K.detach().double() / denominator.of(aggregation)
    if aggregation == "trajectory_mean":
        scale_K = scale_K / tokens_N[trajectory_K]
    # Rounded before the product: what overflows in the gradient then shows in the loss.
    term_K = _terms(value_K, scale_K.to(value_K.dtype))
    return term_K.sum().to(value_K.dtype)


def non_finite_trajectories(
    log_prob_K: Tensor, coefficient_K: Tensor, trajectory_K: Tensor
) -> Tensor:
    """Indices of the trajectories whose part of the loss is not finite, int64, increasing.

    Shapes as in `policy_loss`, for the report that goes with a stopped step. A trajectory is
    named for a coefficient that is NaN or leaves log_prob_K's dtype, for a NaN log-prob, and for
    an infinite log-prob with a coefficient other than 0.
    """
    term_K = _terms(log_prob_K.detach(), coefficient_K.detach().to(log_prob_K.dtype))
    indices: Tensor = torch.unique(trajectory_K[~term_K.isfinite()])
    return indices


def _terms(log_prob_K: Tensor, scale_K: Tensor) -> Tensor:
    # float64, so that the order of summation (the split over micro-batches) does not show.
    product_K = scale_K.double() * log_prob_K.double()
    return torch.where((scale_K == 0) & ~log_prob_K.isnan(), 0.0, product_K)
