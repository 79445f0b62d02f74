"""What one step's ratios looked like: the numbers to read before any reward curve.

Everything is computed in float64 and log space, and is finite for any finite log-ratios, with
one exception: `ratio/retained_mass` is inf when plain importance sampling's own weight is.

Each line: metrics, what they are, and what the mean is taken over.

- ratio/mass_mean, mass_p10, mass_p50, mass_p90, mass_max: group mass M (groups); its expectation
  is 1 as long as the behaviour log-probs are those of the sampling
- ratio/log_mass_p10, log_mass_p50, log_mass_p90, log_mass_max: log M (groups); −inf for M = 0
- ratio/capped_share: M > c (groups); only for a method with a cap
- ratio/deficit_mean: (M − c)₊, the least possible distance from the ratios (groups); with a cap
- ratio/retained_mass: weight (trajectories), what is left of an expected gradient weight of 1
- ratio/is_ratio_mean: ρ (trajectories); the mean mass, where groups are of one size
- ratio/pareto_k: shape k̂ of the generalised Pareto law that fits the largest ρ of the batch
  (trajectories); above 0.7 the mean of ρ is not being estimated, and so no mass is; absent below
  25 possible trajectories
- ratio/ess: (Σρ)²/(G Σρ²), effective share of the samples (groups); 0 for M = 0
- ratio/largest_share: max ρ/Σρ (groups); 0 for M = 0
- ratio/log_ratio_mean, log_ratio_sd: mean and sample standard deviation (divided by n − 1) of ℓ
  over the batch (trajectories, those at −inf left out)
- ratio/log_ratio_sd_lag0: the same at lag 0, engine against learner; absent below two trajectories
- ratio/minus_inf_trajectories: how many have ℓ = −inf and so a weight of 0 (a count)
- ratio/clip_frac: loss tokens that a clip or a mask leaves without weight although their ratio is
  not 0 (tokens); 0 for a method that only truncates
- ratio/mismatch_kl, mismatch_k3_kl: estimates k1 (behaviour − current log-prob) and k3 of
  KL(behaviour ‖ current) (tokens)
- lag/mean, min, max, share_0, share_1, …: learner version − version of the oldest token, and the
  share of each lag that occurs (trajectories)
- advantage/zero_group_share: every advantage of the group is 0 (groups)

A mass, its mean and the deficit stop at the largest float64, 1.8e308; the log form goes on. The
quantile q is the smallest value that at least the share q of the groups does not exceed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_gmc.estimators.groups import Groups
from megatron_gmc.estimators.pareto import pareto_shape
from megatron_gmc.estimators.ratios import group_log_mass, log_sum
from megatron_gmc.estimators.records import TrajectoryRatios

LOG_LARGEST_FLOAT = math.log(sys.float_info.max)

MISMATCH_LIMIT = 1.0
"""Of sd(ℓ) at lag 0; at 1 trajectory-wise capping at 1.2 keeps about two thirds of the weight."""


def step_diagnostics(
    ratios: TrajectoryRatios,
    weight_N: Tensor,
    *,
    epsilon: float | None,
    k3_sum_N: Tensor,
    clipped_N: Tensor,
    lag_N: Tensor,
) -> dict[str, float]:
    """Metrics of a step from the whole batch's per-trajectory values; names in the module's table.

    ratios: all groups of the batch over all ranks; weight_N float64 [N], a trajectory method's
    weights, or the mean over the trajectory's loss tokens of a token method's
    (`trajectory_means`); epsilon: `Estimator.epsilon`; k3_sum_N float64 [N] from `k3_sums`;
    clipped_N float64 [N], how many of the trajectory's loss tokens have weight 0 and a ratio that
    is not; lag_N int64 [N]. A metric without its data (a cap, two trajectories, a token) is absent.
    """
    assert len(ratios.log_ratio_N) > 0, "a step has at least one trajectory"
    for value_N in (weight_N, k3_sum_N, clipped_N, lag_N):
        assert value_N.shape == ratios.log_ratio_N.shape, value_N.shape
    lag0_N = (lag_N == 0) & (ratios.log_ratio_N != -torch.inf)
    return {
        **ratio_diagnostics(ratios, weight_N, epsilon=epsilon),
        **_spread("ratio/log_ratio_sd_lag0", ratios.log_ratio_N[lag0_N]),
        **_token_metrics(ratios, k3_sum_N, clipped_N),
        **lag_metrics(lag_N),
        **advantage_metrics(ratios.advantage_N, ratios.grouping),
    }


def ratio_diagnostics(
    ratios: TrajectoryRatios, weight_N: Tensor, *, epsilon: float | None
) -> dict[str, float]:
    """The part of `step_diagnostics` that log-ratios and weights alone decide."""
    log_mass_P = group_log_mass(ratios.log_ratio_N, ratios.grouping)
    return {
        **_mass_metrics(log_mass_P),
        **_cap_metrics(log_mass_P, epsilon),
        "ratio/is_ratio_mean": _exp_of_mean(ratios.log_ratio_N),
        "ratio/retained_mass": float(weight_N.double().mean()),
        **_concentration_metrics(ratios, log_mass_P),
        **_log_ratio_metrics(ratios.log_ratio_N),
    }


def mismatch_warning(metrics: Mapping[str, float]) -> str | None:
    """What to tell the user where engine and learner disagree with no lag between them, else None.

    `metrics` are those of `step_diagnostics`. Above a standard deviation of 1 in ℓ at lag 0 a cap
    or a mask throws away much of the gradient before any staleness is there to correct.
    """
    spread = metrics.get("ratio/log_ratio_sd_lag0")
    if spread is None or not spread > MISMATCH_LIMIT:
        return None
    return (
        f"engine and learner disagree: the log-ratios of samples without lag have a standard "
        f"deviation of {spread:.2f}, above {MISMATCH_LIMIT:g}, so that weights of whole responses "
        "lose much of the gradient before any lag. Make the two agree (same dtype, float32 output "
        "layer, same kernels), shorten the responses, or weight tokens (estimator.name tis_token "
        "or icepop, or objective.mismatch)"
    )


def _mass_metrics(log_mass_P: Tensor) -> dict[str, float]:
    log_masses = log_mass_P.sort().values.tolist()
    metrics = {"ratio/mass_mean": _exp_of_mean(log_mass_P)}
    for name, percent in (("p10", 10), ("p50", 50), ("p90", 90), ("max", 100)):
        # Whole numbers: 0.1 * 70 is above 7 in floating point.
        log_quantile = log_masses[(len(log_masses) * percent + 99) // 100 - 1]
        metrics[f"ratio/mass_{name}"] = _exp(log_quantile)
        metrics[f"ratio/log_mass_{name}"] = log_quantile
    return metrics


def _cap_metrics(log_mass_P: Tensor, epsilon: float | None) -> dict[str, float]:
    if epsilon is None:
        return {}
    log_cap = math.log1p(epsilon)
    # log (M − c) without forming M; NaN stays, because only what is known to be capped is kept.
    log_deficit_P = log_mass_P + torch.log(-torch.expm1(log_cap - log_mass_P))
    log_deficit_P = torch.where(log_mass_P <= log_cap, -torch.inf, log_deficit_P)
    return {
        "ratio/capped_share": float((log_mass_P > log_cap).double().mean()),
        "ratio/deficit_mean": _exp_of_mean(log_deficit_P),
    }


def _concentration_metrics(ratios: TrajectoryRatios, log_mass_P: Tensor) -> dict[str, float]:
    groups = ratios.grouping
    size_P = groups.sizes()
    log_share_N = groups.add(ratios.log_ratio_N, -(log_mass_P + size_P.log()))
    log_share_N = torch.where(ratios.log_ratio_N == -torch.inf, -torch.inf, log_share_N)
    largest_P = groups.max(log_share_N).exp()
    log_squares_P = log_sum(2 * log_share_N, groups)
    ess_P = torch.where(log_mass_P == -torch.inf, 0.0, (-log_squares_P).exp() / size_P)
    return {
        "ratio/ess": float(ess_P.mean()),
        "ratio/largest_share": float(largest_P.mean()),
    }


def _log_ratio_metrics(log_ratio_N: Tensor) -> dict[str, float]:
    possible_N = log_ratio_N != -torch.inf
    metrics = {"ratio/minus_inf_trajectories": float((~possible_N).sum())}
    if possible_N.any():
        metrics["ratio/log_ratio_mean"] = float(log_ratio_N[possible_N].mean())
    shape = pareto_shape(log_ratio_N[possible_N])
    if shape is not None:
        metrics["ratio/pareto_k"] = shape
    return {**metrics, **_spread("ratio/log_ratio_sd", log_ratio_N[possible_N])}


def _spread(name: str, log_ratio_N: Tensor) -> dict[str, float]:
    return {name: float(log_ratio_N.std(correction=1))} if len(log_ratio_N) >= 2 else {}


def _token_metrics(
    ratios: TrajectoryRatios, k3_sum_N: Tensor, clipped_N: Tensor
) -> dict[str, float]:
    tokens = int(ratios.tokens_N.sum())
    if tokens == 0:
        return {}
    return {
        "ratio/clip_frac": float(clipped_N.sum()) / tokens,
        "ratio/mismatch_kl": -float(ratios.log_ratio_N.sum()) / tokens,
        "ratio/mismatch_k3_kl": float(k3_sum_N.sum()) / tokens,
    }


def lag_metrics(lag_N: Tensor) -> dict[str, float]:
    """Those of `step_diagnostics` that need lags alone; int64 [N]."""
    lags, counts = lag_N.unique(return_counts=True)
    shares = {
        f"lag/share_{lag}": count / len(lag_N)
        for lag, count in zip(lags.tolist(), counts.tolist(), strict=True)
    }
    return {
        "lag/mean": float(lag_N.double().mean()),
        "lag/min": float(lags[0]),
        "lag/max": float(lags[-1]),
        **shares,
    }


def advantage_metrics(advantage_N: Tensor, groups: Groups) -> dict[str, float]:
    """Those of `step_diagnostics` that need advantages alone; float [N]."""
    largest_P = groups.max(advantage_N.double().abs())
    return {"advantage/zero_group_share": float((largest_P == 0).double().mean())}


def _exp_of_mean(log_value_P: Tensor) -> float:
    """Mean of exp(log_value), which stops at the largest float64."""
    return _exp(float(log_value_P.logsumexp(0)) - math.log(len(log_value_P)))


def _exp(log_value: float) -> float:
    return sys.float_info.max if log_value > LOG_LARGEST_FLOAT else math.exp(log_value)
