"""Policy-gradient weights for samples that lag behind the policy: torch alone, no process groups.

Log-ratios of whole groups go in (`TrajectoryRatios`, or `TokenRatios` for methods that weight each
token apart), an estimator of the registry turns them into coefficients, and `policy_loss` puts
those on the current log-probs under the whole batch's denominator.
"""

from megatron_gmc.estimators.advantages import AdvantageKind, advantages
from megatron_gmc.estimators.base import Estimator, TokenEstimator, TrajectoryEstimator
from megatron_gmc.estimators.diagnostics import step_diagnostics
from megatron_gmc.estimators.gmc import GMC
from megatron_gmc.estimators.grpo import GRPO
from megatron_gmc.estimators.loss import (
    AggregationKind,
    Denominator,
    non_finite_trajectories,
    policy_loss,
)
from megatron_gmc.estimators.plain import NoCorrection, PlainIS
from megatron_gmc.estimators.ratios import k3_sums, log_mass, trajectory_means, trajectory_sums
from megatron_gmc.estimators.records import TokenRatios, TrajectoryRatios
from megatron_gmc.estimators.registry import ESTIMATORS, AnyEstimator
from megatron_gmc.estimators.tic import TICClip, TICMask

__all__ = [
    "ESTIMATORS",
    "GMC",
    "GRPO",
    "AdvantageKind",
    "AggregationKind",
    "AnyEstimator",
    "Denominator",
    "Estimator",
    "NoCorrection",
    "PlainIS",
    "TICClip",
    "TICMask",
    "TokenEstimator",
    "TokenRatios",
    "TrajectoryEstimator",
    "TrajectoryRatios",
    "advantages",
    "k3_sums",
    "log_mass",
    "non_finite_trajectories",
    "policy_loss",
    "step_diagnostics",
    "trajectory_means",
    "trajectory_sums",
]
