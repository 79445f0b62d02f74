"""Sums over trajectories and groups."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gmc.estimators import (
    k3_sums,
    log_mass,
    reference_k3,
    trajectory_means,
    trajectory_sums,
)
from tests.estimators import oracle
from tests.estimators.records import double

INF = math.inf
NAN = math.nan


def test_log_ratio_is_a_sum_and_not_a_mean() -> None:
    """R8: token log-ratios 0.3 and −0.1 give ρ = e^0.2."""
    sums_N = trajectory_sums(double([0.3, -0.1]), torch.tensor([0, 0]), 1)
    assert float(sums_N.exp()) == pytest.approx(1.221403, abs=1e-6)


def test_sums_of_interleaved_and_absent_trajectories() -> None:
    sums_N = trajectory_sums(double([1, 10, 2, 20]), torch.tensor([2, 0, 2, 0]), 4)
    assert sums_N.tolist() == [30, 0, 3, 0]


def test_sums_of_float32_values_are_float64() -> None:
    """R2: a float32 sum of 32,768 terms would lose the last digits."""
    value_K = torch.full((32768,), 0.02, dtype=torch.float32)
    sums_N = trajectory_sums(value_K, torch.zeros(32768, dtype=torch.int64), 1)
    assert sums_N.dtype == torch.float64
    assert float(sums_N) == pytest.approx(32768 * float(torch.tensor(0.02)), rel=1e-14)


def test_means_give_an_empty_trajectory_the_ratio_one() -> None:
    means_N = trajectory_means(double([1, 2, 6]), torch.tensor([0, 2, 2]), 3)
    assert means_N.tolist() == [1, 1, 4]


def test_k3_of_a_reference_and_what_its_gradient_is() -> None:
    """Σ π k3 = KL(π ‖ reference) by enumeration; with π as a fixed weight its gradient is that of
    KL(reference ‖ π)."""
    logits = double([0.3, -1.2, 0.8, 0.1]).requires_grad_()
    reference = double([0.1, 0.2, 0.3, 0.4])
    log_p = logits.log_softmax(-1)
    p = log_p.exp().detach()
    terms_K = reference_k3(log_p, reference.log())
    divergence = (p * (log_p - reference.log())).sum()
    torch.testing.assert_close((p * terms_K).sum(), divergence)
    assert bool((terms_K >= 0).all())
    (found,) = torch.autograd.grad((p * terms_K).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((reference * (reference.log() - log_p)).sum(), logits)
    torch.testing.assert_close(found, expected)
    assert reference_k3(reference.log(), reference.log()).tolist() == [0, 0, 0, 0]


def test_k3_is_the_exact_divergence_over_all_tokens() -> None:
    """Σ μ (π/μ − 1 − log π/μ) = KL(μ ‖ π), by enumeration; each term is at least 0."""
    behaviour = double([0.5, 0.3, 0.2])
    current = double([0.2, 0.3, 0.5])
    terms_K = k3_sums((current / behaviour).log(), torch.arange(3), 3)
    divergence = float((behaviour * (behaviour / current).log()).sum())
    assert float((behaviour * terms_K).sum()) == pytest.approx(divergence, rel=1e-12)
    assert bool((terms_K >= 0).all())


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.floats(-5000, 5000), st.integers(0, 3)), min_size=1, max_size=12).map(
        lambda rows: [(r, sorted({g for _, g in rows}).index(g)) for r, g in rows]
    )
)
def test_log_mass_against_decimal_arithmetic(rows: list[tuple[float, int]]) -> None:
    log_ratios, groups = zip(*rows, strict=True)
    log_mass_P = log_mass(double(log_ratios), torch.tensor(groups), max(groups) + 1)
    expected = [float(mass.ln()) for mass in oracle.masses(log_ratios, groups)]
    assert log_mass_P.tolist() == pytest.approx(expected, rel=1e-14, abs=1e-14)


def test_log_mass_of_equal_members_is_the_member() -> None:
    """The group's size is exact in it; log 3 in float32 would show at 1e-8."""
    for size in (1, 3, 7, 16):
        log_mass_P = log_mass(torch.full((size,), 0.25).double(), torch.zeros(size).long(), 1)
        assert float(log_mass_P) == pytest.approx(0.25, abs=1e-15)


def test_log_mass_at_the_ends_of_the_line() -> None:
    """R3: all −inf is −inf; NaN stays in its own group; +inf is +inf."""
    log_ratio_N = double([-INF, -INF, -INF, 0.0, NAN, 0.0, INF, 0.0, 1e300, -1e300])
    group_N = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    log_masses = log_mass(log_ratio_N, group_N, 5).tolist()
    assert log_masses[:2] == [-INF, -math.log(2)]
    assert math.isnan(log_masses[2])
    assert log_masses[3:] == [INF, 1e300]
