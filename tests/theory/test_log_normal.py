"""Closed forms and the lattice against plain quadrature over the normal density and draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_gmc.theory import log_normal

Array = NDArray[np.float64]


def grid(sd: float, points: int) -> tuple[Array, Array]:
    """Ratios and probabilities of a fine trapezoid over ten standard deviations."""
    z = np.linspace(-10, 10 + sd, points)
    weight = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    return np.exp(sd * z - sd * sd / 2), weight


@pytest.mark.parametrize("sd", [0.1, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("epsilon", [0.05, 0.2, 1.0])
def test_closed_forms_are_the_integrals(sd: float, epsilon: float) -> None:
    ratio, weight = grid(sd, 400_001)
    over = np.maximum(ratio - 1 - epsilon, 0)
    assert log_normal.tic_clip_deficit(sd, epsilon) == pytest.approx(over @ weight, abs=1e-8)
    masked = np.where(ratio > 1 + epsilon, ratio, 0) @ weight
    # A jump inside a cell of the trapezoid costs up to the cell's mass.
    assert log_normal.tic_mask_deficit(sd, epsilon) == pytest.approx(masked, abs=2e-4)
    assert log_normal.ratio_variance(sd) == pytest.approx((ratio - 1) ** 2 @ weight, rel=1e-6)


@pytest.mark.parametrize(("sd", "epsilon"), [(0.3, 0.1), (1.0, 0.2), (2.0, 0.2), (3.0, 1.0)])
def test_a_group_of_two_is_the_double_integral(sd: float, epsilon: float) -> None:
    ratio, weight = grid(sd, 4001)
    over = np.maximum((ratio[:, None] + ratio[None, :]) / 2 - 1 - epsilon, 0)
    estimate = log_normal.gmc_deficit(sd, 2, epsilon)
    assert estimate.value == pytest.approx(weight @ over @ weight, abs=2e-6)
    assert estimate.error < 1e-6


@pytest.mark.parametrize("sd", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("group_size", [3, 8, 50])
def test_larger_groups_agree_with_draws(sd: float, group_size: int) -> None:
    draws = np.random.default_rng(7).normal(-sd * sd / 2, sd, (2_000_000 // group_size, group_size))
    # The bounded side: E(c − M)₊ − ε has the same expectation and a far smaller variance.
    value = np.maximum(1.2 - np.exp(draws).mean(1), 0) - 0.2
    error = value.std() / math.sqrt(len(value))
    assert abs(log_normal.gmc_deficit(sd, group_size, 0.2).value - value.mean()) < 5 * error


def test_far_tails_do_not_leak_into_large_groups() -> None:
    """At sd 1 and G = 4096 a mass above 1.2 takes one ratio above 800."""
    assert log_normal.gmc_deficit(1.0, 4096, 0.2).value < 1e-9


def test_the_deficit_falls_with_the_group_and_epsilon_and_rises_with_sd() -> None:
    sizes = [log_normal.gmc_deficit(1.5, g, 0.2).value for g in (1, 2, 3, 5, 8, 13, 100, 1000)]
    assert sizes == sorted(sizes, reverse=True)
    spreads = [log_normal.gmc_deficit(s, 8, 0.2).value for s in (0.2, 0.5, 1, 2, 4, 8)]
    assert spreads == sorted(spreads)
    caps = [log_normal.gmc_deficit(1.5, 8, e).value for e in (0.01, 0.1, 0.5, 2, 10)]
    assert caps == sorted(caps, reverse=True)
    assert sizes[0] == log_normal.tic_clip_deficit(1.5, 0.2)


@pytest.mark.parametrize("sd", [0.5, 1.0, 1.5])
def test_the_group_size_found_is_the_least(sd: float) -> None:
    found = log_normal.group_size_for(0.05, sd, 0.2)
    assert found is not None
    assert found > 1
    assert log_normal.gmc_deficit(sd, found, 0.2).value <= 0.05
    assert log_normal.gmc_deficit(sd, found - 1, 0.2).value > 0.05


def test_a_hopeless_search_says_none() -> None:
    assert log_normal.group_size_for(0.05, 4.0, 0.2) is None
    assert log_normal.epsilon_for(0.05, 6.0, 8) is None


def test_the_other_searches_end_where_the_deficit_is_met() -> None:
    sd = log_normal.sd_for(0.05, 8, 0.2)
    assert log_normal.gmc_deficit(sd, 8, 0.2).value == pytest.approx(0.05, abs=1e-4)
    epsilon = log_normal.epsilon_for(0.05, 1.3, 8)
    assert epsilon is not None
    assert log_normal.gmc_deficit(1.3, 8, epsilon).value == pytest.approx(0.05, abs=1e-4)


def test_retained_mass_is_the_mean_weight() -> None:
    """E min(M, c), E min(ρ, c) and E ρ·1{ρ ≤ c}, on draws."""
    ratio = np.exp(np.random.default_rng(3).normal(-0.5, 1.0, (200_000, 8)))
    kept = log_normal.retained_mass(1.0, 8, 0.2)
    assert kept.gmc == pytest.approx(np.minimum(ratio.mean(1), 1.2).mean(), abs=3e-3)
    assert kept.tic_clip == pytest.approx(np.minimum(ratio, 1.2).mean(), abs=3e-3)
    assert kept.tic_mask == pytest.approx(np.where(ratio <= 1.2, ratio, 0).mean(), abs=3e-3)


def test_faulty_values_are_named() -> None:
    with pytest.raises(ValueError, match="sd must be finite and above 0, got 0"):
        log_normal.tic_clip_deficit(0.0, 0.2)
    with pytest.raises(ValueError, match="epsilon must be finite and above 0, got -1"):
        log_normal.gmc_deficit(1.0, 8, -1.0)
    with pytest.raises(ValueError, match="group_size must be between 1 and 4096, got 0"):
        log_normal.gmc_deficit(1.0, 0, 0.2)
    with pytest.raises(ValueError, match="deficit must be between 0 and 1, got 0"):
        log_normal.group_size_for(0.0, 1.0, 0.2)


def test_a_spread_beyond_float64_loses_everything() -> None:
    """R2: sd(ℓ) of 535, as long trajectories can have."""
    assert log_normal.ratio_variance(535.0) == math.inf
    assert log_normal.retained_mass(535.0, 8, 0.2).gmc == pytest.approx(0, abs=1e-9)
