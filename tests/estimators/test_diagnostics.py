"""The step's metrics against loops in plain Python, and at the ends of the number line."""

from __future__ import annotations

import math
import statistics
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gmc.estimators import (
    ESTIMATORS,
    GMC,
    NoCorrection,
    TrajectoryRatios,
    k3_sums,
    mismatch_warning,
    step_diagnostics,
    trajectory_sums,
)
from tests.estimators.records import double, trajectory_ratios

INF = math.inf


def diagnose(
    ratios: TrajectoryRatios,
    epsilon: float | None = 0.2,
    lags: list[int] | None = None,
    k3_sums: list[float] | None = None,
    clipped: list[float] | None = None,
) -> dict[str, float]:
    n = len(ratios.log_ratio_N)
    estimator = NoCorrection() if epsilon is None else GMC(epsilon=epsilon)
    return step_diagnostics(
        ratios,
        estimator.weights(ratios),
        epsilon=estimator.epsilon,
        k3_sum_N=double(k3_sums if k3_sums is not None else [0.0] * n),
        clipped_N=double(clipped if clipped is not None else [0.0] * n),
        lag_N=torch.tensor(lags if lags is not None else [0] * n),
    )


def by_loops(groups: list[list[float]], epsilon: float) -> dict[str, float]:
    cap = 1 + epsilon
    ratios = [[math.exp(r) for r in members] for members in groups]
    masses = sorted(statistics.fmean(members) for members in ratios)
    flat = [r for members in groups for r in members]

    def quantile(share: float) -> float:
        return next(m for m in masses if sum(x <= m for x in masses) >= share * len(masses) - 1e-9)

    return {
        "ratio/mass_mean": statistics.fmean(masses),
        "ratio/mass_p10": quantile(0.1),
        "ratio/mass_p50": quantile(0.5),
        "ratio/mass_p90": quantile(0.9),
        "ratio/mass_max": masses[-1],
        "ratio/capped_share": statistics.fmean(float(m > cap) for m in masses),
        "ratio/deficit_mean": statistics.fmean(max(m - cap, 0.0) for m in masses),
        "ratio/ess": statistics.fmean(
            sum(m) ** 2 / (len(m) * sum(r * r for r in m)) for m in ratios
        ),
        "ratio/largest_share": statistics.fmean(max(m) / sum(m) for m in ratios),
        "ratio/log_ratio_mean": statistics.fmean(flat),
        "ratio/is_ratio_mean": statistics.fmean(math.exp(r) for r in flat),
        "ratio/log_ratio_sd": statistics.stdev(flat),
    }


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.floats(-8, 8), min_size=2, max_size=5), min_size=1, max_size=25),
    st.floats(0.05, 2),
)
def test_against_loops(groups: list[list[float]], epsilon: float) -> None:
    flat = [(r, g) for g, members in enumerate(groups) for r in members]
    metrics = diagnose(trajectory_ratios([r for r, _ in flat], [g for _, g in flat]), epsilon)
    for name, expected in by_loops(groups, epsilon).items():
        assert metrics[name] == pytest.approx(expected, rel=1e-9, abs=1e-12), name


def test_retained_mass_is_the_mean_of_min_m_and_c() -> None:
    """Two groups of two: M = 2 and M = 0.5."""
    ratios = trajectory_ratios([math.log(x) for x in (3, 1, 0.75, 0.25)], [0, 0, 1, 1])
    assert diagnose(ratios)["ratio/retained_mass"] == pytest.approx((1.2 + 0.5) / 2)
    assert diagnose(ratios, epsilon=None)["ratio/retained_mass"] == 1


def test_standard_deviation_of_a_long_response() -> None:
    """R2: n − 1 below gives 535; n would give 463.4."""
    value_K = torch.tensor([0.02, -0.02, 0.0, 0.0]).repeat_interleave(32768)
    log_ratio_N = trajectory_sums(value_K, torch.arange(4).repeat_interleave(32768), 4)
    metrics = diagnose(trajectory_ratios(log_ratio_N))
    assert metrics["ratio/log_ratio_sd"] == pytest.approx(535.1, abs=0.05)
    assert metrics["ratio/log_ratio_sd"] * math.sqrt(3 / 4) == pytest.approx(463.4, abs=0.05)
    assert all(math.isfinite(value) for value in metrics.values())


def test_mismatch_at_lag_zero_takes_those_trajectories_alone() -> None:
    ratios = trajectory_ratios([0.1, 9.0, -0.3, 7.0])
    metrics = diagnose(ratios, lags=[0, 4, 0, 5])
    assert metrics["ratio/log_ratio_sd_lag0"] == pytest.approx(statistics.stdev([0.1, -0.3]))
    assert "ratio/log_ratio_sd_lag0" not in diagnose(ratios, lags=[0, 1, 2, 3])
    assert "ratio/log_ratio_sd_lag0" not in diagnose(ratios, lags=[1, 1, 1, 1])


@pytest.mark.parametrize(
    ("spread", "warned"), [(0.99, False), (1.0, False), (1.01, True), (None, False)]
)
def test_a_mismatch_without_lag_is_told_with_its_remedy(spread: float | None, warned: bool) -> None:
    metrics = {} if spread is None else {"ratio/log_ratio_sd_lag0": spread}
    text = mismatch_warning({"ratio/log_ratio_sd": 5.0, **metrics})
    assert (text is not None) == warned
    if text is not None:
        assert "deviation of 1.01" in text
        assert "tis_token" in text


def test_the_tail_of_a_batch() -> None:
    """Log-normal ratios of σ = 3 are beyond 0.7, those of σ = 0.1 far below; none for 24."""
    generator = torch.Generator().manual_seed(0)
    normal_N = torch.randn(1024, generator=generator, dtype=torch.float64)
    groups = [i // 8 for i in range(1024)]
    heavy = diagnose(trajectory_ratios(3 * normal_N, groups))["ratio/pareto_k"]
    light = diagnose(trajectory_ratios(0.1 * normal_N, groups))["ratio/pareto_k"]
    assert light < 0.3 < 0.7 < heavy
    assert "ratio/pareto_k" not in diagnose(trajectory_ratios(normal_N[:24]))


def test_lags() -> None:
    metrics = diagnose(trajectory_ratios([0.0] * 4), lags=[16, 2, 2, 0])
    assert {k: v for k, v in metrics.items() if k.startswith("lag/")} == {
        "lag/mean": 5,
        "lag/min": 0,
        "lag/max": 16,
        "lag/share_0": 0.25,
        "lag/share_2": 0.5,
        "lag/share_16": 0.25,
    }


def test_divergence_is_per_token() -> None:
    """k1 and k3 over all tokens, not over trajectories' means; KL by enumeration."""
    behaviour = double([0.5, 0.25, 0.25])
    current = double([0.25, 0.5, 0.25])
    # Four tokens that are exactly the behaviour policy's frequencies, in two trajectories.
    token_K = torch.tensor([0, 0, 1, 2])
    trajectory_K = torch.tensor([0, 0, 0, 1])
    log_ratio_K = (current / behaviour).log()[token_K]
    ratios = trajectory_ratios(trajectory_sums(log_ratio_K, trajectory_K, 2), tokens=[3, 1])
    metrics = diagnose(ratios, k3_sums=k3_sums(log_ratio_K, trajectory_K, 2).tolist())
    divergence = float((behaviour * (behaviour / current).log()).sum())
    assert metrics["ratio/mismatch_kl"] == pytest.approx(divergence, rel=1e-12)
    assert metrics["ratio/mismatch_k3_kl"] == pytest.approx(divergence, rel=1e-12)


def test_clipped_tokens_are_counted_over_tokens() -> None:
    ratios = trajectory_ratios([0.0, 0.0], tokens=[5, 3])
    assert diagnose(ratios, clipped=[1, 1])["ratio/clip_frac"] == pytest.approx(2 / 8)
    assert "ratio/clip_frac" not in diagnose(trajectory_ratios([0.0], tokens=[0]))


def test_impossible_trajectories_are_counted() -> None:
    """R3: one group wholly at −inf, one in part."""
    ratios = trajectory_ratios([-INF, -INF, -INF, 0.0, 0.2], [0, 0, 1, 1, 1])
    metrics = diagnose(ratios)
    assert metrics["ratio/minus_inf_trajectories"] == 3
    assert metrics["ratio/log_mass_p10"] == -INF
    assert metrics["ratio/mass_p10"] == 0
    assert metrics["ratio/largest_share"] == pytest.approx((0 + 1 / (1 + math.exp(-0.2))) / 2)
    assert metrics["ratio/log_ratio_mean"] == pytest.approx(0.1)
    assert not any(math.isnan(value) for value in metrics.values())


def test_a_batch_wholly_at_minus_infinity() -> None:
    metrics = diagnose(trajectory_ratios([-INF, -INF]))
    assert metrics["ratio/ess"] == metrics["ratio/mass_mean"] == metrics["ratio/deficit_mean"] == 0
    assert "ratio/log_ratio_mean" not in metrics
    assert not any(math.isnan(value) for value in metrics.values())


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5), min_size=1, max_size=5))
def test_finite_for_any_finite_log_ratios(groups: list[list[float]]) -> None:
    flat = [(r, g) for g, members in enumerate(groups) for r in members]
    metrics = diagnose(trajectory_ratios([r for r, _ in flat], [g for _, g in flat]))
    assert all(math.isfinite(value) for value in metrics.values())
    assert 0 < metrics["ratio/ess"] <= 1 + 1e-9
    assert 0 < metrics["ratio/largest_share"] <= 1 + 1e-9


def test_a_mass_beyond_float64_stops_there_and_goes_on_in_logs() -> None:
    metrics = diagnose(trajectory_ratios([2000.0, 2000.0, 0.0, 0.0], [0, 0, 1, 1]))
    assert metrics["ratio/mass_max"] == metrics["ratio/mass_mean"] == sys.float_info.max
    assert metrics["ratio/deficit_mean"] == sys.float_info.max
    assert metrics["ratio/log_mass_max"] == 2000
    assert metrics["ratio/log_mass_p50"] == 0


def test_nan_is_not_hidden() -> None:
    metrics = diagnose(trajectory_ratios([math.nan, 0.0, 0.0, 0.0], [0, 0, 1, 1]))
    for name in ("mass_mean", "mass_max", "deficit_mean", "retained_mass", "ess", "log_ratio_sd"):
        assert math.isnan(metrics[f"ratio/{name}"]), name


def test_metrics_without_their_data_are_absent() -> None:
    ratios = trajectory_ratios([0.5], tokens=[0])
    metrics = diagnose(ratios, epsilon=None)
    assert "ratio/capped_share" not in metrics
    assert "ratio/deficit_mean" not in metrics
    assert "ratio/log_ratio_sd" not in metrics
    assert "ratio/mismatch_kl" not in metrics
    assert metrics["ratio/mass_mean"] == pytest.approx(math.exp(0.5))


def test_groups_without_a_signal() -> None:
    ratios = trajectory_ratios(
        [0.0] * 5, groups=[0, 1, 0, 2, 2], advantages=[0.0, 0.0, 0.0, -1.0, 1.0]
    )
    assert diagnose(ratios)["advantage/zero_group_share"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("method", sorted(ESTIMATORS))
def test_a_cap_is_declared_by_the_methods_that_have_one(method: str) -> None:
    """`epsilon` is what the caller hands to the diagnostics."""
    capped = {
        "gmc", "gmc_pooled", "gmc_differentiable", "water_filling", "soft_threshold", "tic_clip",
        "tic_mask",
    }  # fmt: skip
    assert ESTIMATORS[method]().epsilon == (0.2 if method in capped else None)
