"""Group-mass capping (arXiv 2610.01896): a group's ratios shrink together, never one by one."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_gmc.estimators.base import (
    Scope,
    TrajectoryEstimator,
    check_above_zero,
    times_advantage,
)
from megatron_gmc.estimators.groups import Groups
from megatron_gmc.estimators.ratios import group_log_mass
from megatron_gmc.estimators.records import TrajectoryRatios


@dataclass(frozen=True)
class GMC(TrajectoryEstimator):
    """w_i = ρ_i · min(1, c/M), c = 1 + ε, M the mean of ρ over the group.

    M ≤ c leaves plain importance sampling; above it the group's mean weight is c. No weight
    exceeds c times the group's size. A group of one is TIC-clip.

    member_limit (not in the paper, off by default): b in w_i = min(ρ_i · min(1, c/M), b), a number
    of at least c, or "G^β" with 0 < β < 1 for the power of the group's size, which is then never
    less than c. It bounds E w² by b, for a bias of at most E(ρ − b)₊ more.
    """

    name: Literal["gmc"] = "gmc"
    epsilon: float = 0.2
    member_limit: float | str | None = None
    scope: ClassVar[Scope] = "group"

    def __post_init__(self) -> None:
        check_above_zero("epsilon", self.epsilon)
        if isinstance(self.member_limit, str):
            _exponent(self.member_limit)
        elif self.member_limit is not None:
            check_above_zero("member_limit", self.member_limit)
            if self.member_limit < 1 + self.epsilon:
                raise ValueError(
                    f"member_limit must be at least 1 + epsilon = {1 + self.epsilon:g}, "
                    f"got {self.member_limit:g}"
                )

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """min(ℓ + min(0, log c − log M), log b): finite for any finite ℓ, float64 [N]."""
        groups = ratios.grouping
        log_mass_P = group_log_mass(ratios.log_ratio_N, groups)
        log_weight_N = groups.add(ratios.log_ratio_N, _log_shrink(log_mass_P, self.epsilon))
        if self.member_limit is None:
            return log_weight_N
        return torch.minimum(log_weight_N, groups.spread(self._limits(groups).log()))

    def weights(self, ratios: TrajectoryRatios) -> Tensor:
        """exp(log_weights), with one exponential a trajectory while no mass leaves float64."""
        groups = ratios.grouping
        weight_N = ratios.log_ratio_N.detach().exp()
        mass_P = groups.sum(weight_N).div_(groups.sizes())
        if not bool(mass_P.isfinite().all()):
            return super().weights(ratios)
        groups.scale_(weight_N, ((1 + self.epsilon) / mass_P).clamp_(max=1.0))
        if self.member_limit is None:
            return weight_N
        return torch.minimum(weight_N, groups.spread(self._limits(groups)))

    def _limits(self, groups: Groups) -> Tensor:
        """b of each group, float64 [P]."""
        if isinstance(self.member_limit, str):
            power_P: Tensor = groups.sizes() ** _exponent(self.member_limit)
            return power_P.clamp(min=1 + self.epsilon)
        assert self.member_limit is not None
        return torch.full_like(groups.sizes(), self.member_limit)


@dataclass(frozen=True)
class GMCPooled(TrajectoryEstimator):
    """w_i = ρ_i · min(1, c/M), M the mean of ρ over the trajectories of the whole batch.

    An ablation: a smaller deficit than group by group, and one bad prompt shrinks every other.
    """

    name: Literal["gmc_pooled"] = "gmc_pooled"
    epsilon: float = 0.2
    scope: ClassVar[Scope] = "batch"

    def __post_init__(self) -> None:
        check_above_zero("epsilon", self.epsilon)

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """ℓ + min(0, log c − log M): finite for any finite ℓ, float64 [N]."""
        log_ratio_N = ratios.log_ratio_N
        log_mass = log_ratio_N.logsumexp(0) - math.log(len(log_ratio_N))
        return log_ratio_N + _log_shrink(log_mass, self.epsilon)


@dataclass(frozen=True)
class GMCDifferentiable(TrajectoryEstimator):
    """The gradient of Σ w_i A_i itself, w those of gmc and not held fixed.

    An ablation: w_i A_i ∇ log π_i where M ≤ c, and w_i (A_i − Ā) ∇ log π_i above, Ā = Σρ_j A_j /
    Σρ_j, a self-normalised baseline. A trajectory with advantage 0 takes part in a capped group.
    """

    name: Literal["gmc_differentiable"] = "gmc_differentiable"
    epsilon: float = 0.2
    scope: ClassVar[Scope] = "group"

    def __post_init__(self) -> None:
        check_above_zero("epsilon", self.epsilon)

    def log_weights(self, ratios: TrajectoryRatios) -> Tensor:
        """Those of gmc, float64 [N]."""
        return GMC(epsilon=self.epsilon).log_weights(ratios)

    def coefficients(self, ratios: TrajectoryRatios) -> Tensor:
        """w·(A − Ā) in capped groups and w·A elsewhere, float64 [N]."""
        with torch.no_grad():
            groups = ratios.grouping
            log_mass_P = group_log_mass(ratios.log_ratio_N, groups)
            share_N = groups.add(ratios.log_ratio_N, -(log_mass_P + groups.sizes().log())).exp()
            advantage_N = ratios.advantage_N.double()
            baseline_P = groups.sum(share_N * advantage_N)
            capped_P = log_mass_P > math.log1p(self.epsilon)
            baseline_P = torch.where(capped_P, baseline_P, 0.0)
            return times_advantage(self.weights(ratios), groups.add(advantage_N, -baseline_P))


def _log_shrink(log_mass: Tensor, epsilon: float) -> Tensor:
    """min(0, log c − log M)."""
    return (math.log1p(epsilon) - log_mass).clamp(max=0.0)


def _exponent(member_limit: str) -> float:
    """β of "G^β"; raises ValueError for anything else."""
    found = re.fullmatch(r"G\^(\d*\.?\d+)", member_limit)
    if found is None or not 0 < float(found[1]) < 1:
        raise ValueError(
            'member_limit must be a number or "G^β" with 0 < β < 1, as in "G^0.33", '
            f"got {member_limit!r}"
        )
    return float(found[1])
