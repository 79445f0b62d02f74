"""What an estimator looks at: plain tensors, no process groups, no model.

Tensor suffixes: _K loss tokens (flat, already selected by the mask), _N trajectories, _P groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_gmc.estimators.groups import Groups


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
    behaviour_log_prob_N: Tensor | None = None
    """float64 [N]: sum over loss tokens of the behaviour log-prob, for methods that look at the
    probabilities themselves (gepo); None where no such method is used."""

    def __post_init__(self) -> None:
        assert self.log_ratio_N.dtype == torch.float64, self.log_ratio_N.dtype
        assert self.log_ratio_N.ndim == 1, self.log_ratio_N.shape
        for value in (self.group_N, self.advantage_N, self.tokens_N):
            assert value.shape == self.log_ratio_N.shape, (value.shape, self.log_ratio_N.shape)

    @cached_property
    def grouping(self) -> Groups:
        """`group_N` and how to reduce over it."""
        return Groups.of(self.group_N, self.groups)


@dataclass(frozen=True, eq=False)
class TokenRatios:
    """Per-token values for methods that weight each token apart.

    Any set of trajectories will do, except for a method whose scope is the batch.
    """

    log_ratio_K: Tensor
    """float32 or float64 [K]: current − behaviour log-prob of each loss token."""
    trajectory_K: Tensor
    """int64 [K]: index of the token's trajectory in [0, N)."""
    advantage_N: Tensor
    """float32 or float64 [N]."""
    proximal_log_ratio_K: Tensor | None = None
    """float32 or float64 [K]: proximal − behaviour log-prob, the proximal policy being the one at
    the start of the update. None says that it is the current policy, as with one optimizer step
    a batch; then this ratio is log_ratio_K, and current over proximal is 1."""

    def __post_init__(self) -> None:
        assert self.log_ratio_K.ndim == 1, self.log_ratio_K.shape
        assert self.trajectory_K.shape == self.log_ratio_K.shape, self.trajectory_K.shape
        if self.proximal_log_ratio_K is not None:
            assert self.proximal_log_ratio_K.shape == self.log_ratio_K.shape

    @property
    def advantage_K(self) -> Tensor:
        """The advantage of each token's trajectory."""
        return self.advantage_N[self.trajectory_K]

    def staleness_and_update(self) -> tuple[Tensor, Tensor]:
        """log(proximal/behaviour) and log(current/proximal), float64 [K]; they add up to log r."""
        log_ratio_K = self.log_ratio_K.double()
        if self.proximal_log_ratio_K is None:
            return log_ratio_K, torch.zeros_like(log_ratio_K)
        staleness_K = self.proximal_log_ratio_K.double()
        return staleness_K, log_ratio_K - staleness_K
