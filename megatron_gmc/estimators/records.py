"""What an estimator looks at: plain tensors, no process groups, no model.

Tensor suffixes: _K loss tokens (flat, already selected by the mask), _N trajectories, _P groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TrajectoryRatios:
    """Per-trajectory values of *whole* groups: one micro-batch's, or the batch's over all ranks.

    A group that is cut in two has another mass, so a caller that spreads a group gathers
    `log_ratio_N` first. Every index below `groups` occurs; an index without a member would have
    the mass of an empty mean, NaN.
    """

    log_ratio_N: Tensor
    """float64 [N]: sum over loss tokens of current − behaviour log-prob. −inf is allowed; NaN and
    +inf are not hidden: they come out as a weight that is not finite."""
    group_N: Tensor
    """int64 [N]: which group, dense in [0, groups), in any order."""
    advantage_N: Tensor
    """float32 or float64 [N]."""
    tokens_N: Tensor
    """int64 [N]: number of loss tokens."""
    groups: int

    def __post_init__(self) -> None:
        assert self.log_ratio_N.dtype == torch.float64, self.log_ratio_N.dtype
        assert self.log_ratio_N.ndim == 1, self.log_ratio_N.shape
        for value in (self.group_N, self.advantage_N, self.tokens_N):
            assert value.shape == self.log_ratio_N.shape, (value.shape, self.log_ratio_N.shape)


@dataclass(frozen=True, eq=False)
class TokenRatios:
    """Per-token values of any set of trajectories, for methods that weight each token apart."""

    log_ratio_K: Tensor
    """float32 or float64 [K]: current − behaviour log-prob of each loss token."""
    trajectory_K: Tensor
    """int64 [K]: index of the token's trajectory in [0, N)."""
    advantage_N: Tensor
    """float32 or float64 [N]."""

    def __post_init__(self) -> None:
        assert self.log_ratio_K.ndim == 1, self.log_ratio_K.shape
        assert self.trajectory_K.shape == self.log_ratio_K.shape, self.trajectory_K.shape
