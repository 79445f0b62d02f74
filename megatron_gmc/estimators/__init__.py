"""Policy-gradient weights for samples that lag behind the policy: torch alone, no process groups.

Log-ratios of whole groups go in (`TrajectoryRatios`, or `TokenRatios` for methods that weight each
token apart), an estimator of the registry turns them into coefficients, and `policy_loss` puts
those on the current log-probs under the whole batch's denominator.
"""

from megatron_gmc.estimators.advantages import AdvantageKind, advantages
from megatron_gmc.estimators.base import Estimator, Scope, TokenEstimator, TrajectoryEstimator
from megatron_gmc.estimators.diagnostics import (
    advantage_metrics,
    lag_metrics,
    mismatch_warning,
    ratio_diagnostics,
    step_diagnostics,
)
from megatron_gmc.estimators.gmc import GMC, GMCDifferentiable, GMCPooled
from megatron_gmc.estimators.grpo import CISPO, GRPO
from megatron_gmc.estimators.gspo import GEPO, GSPO
from megatron_gmc.estimators.loss import (
    AggregationKind,
    Denominator,
    non_finite_trajectories,
    policy_loss,
    weighted_sum,
)
from megatron_gmc.estimators.m2po import M2PO
from megatron_gmc.estimators.members import SoftThreshold, WaterFilling
from megatron_gmc.estimators.mismatch import AnyMismatch, MaskedMismatch, TruncatedMismatch
from megatron_gmc.estimators.pareto import pareto_shape
from megatron_gmc.estimators.plain import SNIS, NoCorrection, PlainIS
from megatron_gmc.estimators.proximal import DecoupledPPO, IcePop, TISToken
from megatron_gmc.estimators.ratios import (
    k3_sums,
    log_mass,
    reference_k3,
    trajectory_means,
    trajectory_sums,
)
from megatron_gmc.estimators.records import TokenRatios, TrajectoryRatios
from megatron_gmc.estimators.registry import ESTIMATORS, AnyEstimator
from megatron_gmc.estimators.sequence import MIS, TISSequence
from megatron_gmc.estimators.tic import TICClip, TICMask

__all__ = [
    "CISPO",
    "ESTIMATORS",
    "GEPO",
    "GMC",
    "GRPO",
    "GSPO",
    "M2PO",
    "MIS",
    "SNIS",
    "AdvantageKind",
    "AggregationKind",
    "AnyEstimator",
    "AnyMismatch",
    "DecoupledPPO",
    "Denominator",
    "Estimator",
    "GMCDifferentiable",
    "GMCPooled",
    "IcePop",
    "MaskedMismatch",
    "NoCorrection",
    "PlainIS",
    "Scope",
    "SoftThreshold",
    "TICClip",
    "TICMask",
    "TISSequence",
    "TISToken",
    "TokenEstimator",
    "TokenRatios",
    "TrajectoryEstimator",
    "TrajectoryRatios",
    "TruncatedMismatch",
    "WaterFilling",
    "advantage_metrics",
    "advantages",
    "k3_sums",
    "lag_metrics",
    "log_mass",
    "mismatch_warning",
    "non_finite_trajectories",
    "pareto_shape",
    "policy_loss",
    "ratio_diagnostics",
    "reference_k3",
    "step_diagnostics",
    "trajectory_means",
    "trajectory_sums",
    "weighted_sum",
]
