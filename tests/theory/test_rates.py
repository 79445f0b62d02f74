"""Theorem R: its exponents, its optimum and what each term depends on."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_gmc.theory import rates

PROBLEM = rates.Problem(
    smoothness=0.8,
    gradient_bound=1.5,
    overlap=1.2,
    gap=0.7,
    epsilon=0.2,
    group_size=8,
    lag=16,
    steps=5000,
)


@pytest.mark.parametrize(
    ("method", "field", "exponent"),
    [
        ("gmc", "group_size", -2 / 5),
        ("gmc", "lag", 4 / 5),
        ("gmc", "steps", -4 / 5),
        ("tic_clip", "group_size", 0),
        ("tic_clip", "lag", 4 / 5),
        ("tic_mask", "group_size", 0),
        ("tic_mask", "steps", -4 / 5),
    ],
)
def test_exponents_of_the_tuned_term(method: rates.Method, field: str, exponent: float) -> None:
    """E9."""
    moved = replace(PROBLEM, **{field: 16 * getattr(PROBLEM, field)})
    before, after = (rates.tuned_delay_term(p, method) for p in (PROBLEM, moved))
    assert math.log(after / before, 16) == pytest.approx(exponent, abs=1e-12)


@pytest.mark.parametrize(
    ("method", "exponent"), [("gmc", -2 / 5), ("tic_clip", -2 / 5), ("tic_mask", -4 / 5)]
)
def test_exponent_of_epsilon_apart_from_the_cap(method: rates.Method, exponent: float) -> None:
    """E9: c = 1 + ε tends to 1, so a small ε shows the order alone."""
    small, smaller = (replace(PROBLEM, epsilon=e) for e in (1e-6, 1e-7))
    ratio = rates.tuned_delay_term(small, method) / rates.tuned_delay_term(smaller, method)
    assert math.log10(ratio) == pytest.approx(exponent, abs=1e-5)


@pytest.mark.parametrize("method", ["gmc", "tic_clip", "tic_mask"])
def test_the_tuned_step_size_is_the_minimum(method: rates.Method) -> None:
    best = rates.delay_step_size(PROBLEM, method)

    def delay_part(step_size: float) -> float:
        terms = rates.convergence_bound(PROBLEM, method, step_size)
        return terms.start + terms.bias

    assert delay_part(best) == pytest.approx(rates.tuned_delay_term(PROBLEM, method), rel=1e-12)
    assert all(delay_part(best) <= delay_part(best * f) for f in np.geomspace(0.1, 10, 101))


def test_bias_terms_against_their_written_form() -> None:
    """C⁴c⁴B⁶η⁴τ⁴/(16G²ε²), the same at G = 1, and C⁴c⁶B⁶η⁴τ⁴/ε⁴."""
    eta = 0.01
    common = 1.2**4 * 1.2**4 * 1.5**6 * eta**4 * 16**4
    expected = {
        "gmc": common / (16 * 64 * 0.04),
        "tic_clip": common / (16 * 0.04),
        "tic_mask": common * 1.2**2 / 0.2**4,
    }
    found = {
        "gmc": rates.convergence_bound(PROBLEM, "gmc", eta).bias,
        "tic_clip": rates.convergence_bound(PROBLEM, "tic_clip", eta).bias,
        "tic_mask": rates.convergence_bound(PROBLEM, "tic_mask", eta).bias,
    }
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_lag_enters_through_the_bias_alone() -> None:
    fresh, stale = (
        rates.convergence_bound(replace(PROBLEM, lag=lag), "gmc", 0.01) for lag in (0, 64)
    )
    assert (fresh.start, fresh.second_moment) == (stale.start, stale.second_moment)
    assert fresh.bias == 0
    assert stale.total > fresh.total


def test_without_lag_the_second_moment_chooses_the_step_size() -> None:
    fresh = replace(PROBLEM, lag=0)
    assert rates.delay_step_size(fresh, "gmc") == math.inf
    best = rates.tuned_step_size(fresh, "gmc")
    total = rates.convergence_bound(fresh, "gmc", best).total
    assert all(
        total <= rates.convergence_bound(fresh, "gmc", best * f).total
        for f in np.geomspace(0.1, 10, 101)
    )
    assert rates.tuned_step_size(PROBLEM, "gmc") <= rates.delay_step_size(PROBLEM, "gmc")
