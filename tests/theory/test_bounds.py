"""Bounds against laws whose expectations are enumerated in exact fractions."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gmc.theory import bounds

Law = list[tuple[Fraction, Fraction]]
"""(ratio, probability), mean 1."""


@st.composite
def laws(draw: st.DrawFn) -> Law:
    """Three atoms of any weights, scaled to mean 1."""
    values = draw(st.lists(st.integers(0, 500), min_size=3, max_size=3).filter(any))
    weights = draw(st.lists(st.integers(1, 100), min_size=3, max_size=3))
    mean = Fraction(sum(v * w for v, w in zip(values, weights, strict=True)), sum(weights))
    if mean == 0:
        return [(Fraction(1), Fraction(1))]
    return [
        (Fraction(v) / mean, Fraction(w, sum(weights)))
        for v, w in zip(values, weights, strict=True)
    ]


def two_point(low: Fraction, high: Fraction) -> Law:
    chance = (1 - low) / (high - low)
    return [(low, 1 - chance), (high, chance)]


def variance(law: Law) -> float:
    return float(sum(p * (r - 1) ** 2 for r, p in law))


def deficit(law: Law, group_size: int, epsilon: Fraction) -> float:
    """E(M − c)₊ over every group."""
    total = Fraction(0)
    for group in itertools.product(law, repeat=group_size):
        mass = sum((r for r, _ in group), Fraction(0)) / group_size
        total += math.prod((p for _, p in group), start=Fraction(1)) * max(mass - 1 - epsilon, 0)
    return float(total)


EPSILONS = st.sampled_from([Fraction(1, 20), Fraction(1, 5), Fraction(1), Fraction(3)])


@settings(max_examples=60, deadline=None)
@given(law=laws(), group_size=st.integers(1, 4), epsilon=EPSILONS)
def test_no_law_exceeds_the_bounds_of_a_group(law: Law, group_size: int, epsilon: Fraction) -> None:
    exact, v, e = deficit(law, group_size, epsilon), variance(law), float(epsilon)
    sharp = bounds.deficit_bound(v, group_size, e)
    scarf = bounds.scarf_bound(v, group_size, e)
    assert exact <= sharp + 1e-12
    assert sharp <= scarf + 1e-12
    assert scarf <= bounds.variance_bound(v, group_size, e) + 1e-12
    largest = max(float(r) for r, _ in law)
    assert exact <= bounds.bernstein_bound(v, group_size, e, largest) + 1e-9


@settings(max_examples=150, deadline=None)
@given(law=laws(), epsilon=EPSILONS)
def test_no_law_exceeds_the_bounds_of_a_single_ratio(law: Law, epsilon: Fraction) -> None:
    v, e = variance(law), float(epsilon)
    masked = float(sum(p * r for r, p in law if r > 1 + epsilon))
    assert deficit(law, 1, epsilon) <= bounds.tic_clip_bound(v, e) + 1e-12
    assert masked <= bounds.tic_mask_bound(v, e) + 1e-12
    assert bounds.tic_mask_bound(v, e) <= bounds.tic_mask_simple_bound(v, e) + 1e-12


@settings(max_examples=40, deadline=None)
@given(law=laws(), group_size=st.integers(2, 4))
def test_the_deficit_never_rises_with_the_group(law: Law, group_size: int) -> None:
    epsilon = Fraction(1, 5)
    assert deficit(law, group_size, epsilon) <= deficit(law, group_size - 1, epsilon) + 1e-12


@settings(max_examples=40, deadline=None)
@given(law=laws(), group_size=st.integers(2, 4), share=st.sampled_from([0, Fraction(1, 3), 1]))
def test_a_member_limit_stays_under_its_bound(law: Law, group_size: int, share: Fraction) -> None:
    cap = Fraction(6, 5)
    limit = cap + share * (cap * group_size - cap)
    exact = Fraction(0)
    for group in itertools.product(law, repeat=group_size):
        mass = sum((r for r, _ in group), Fraction(0)) / group_size
        shrink = min(Fraction(1), cap / mass) if mass else Fraction(1)
        lost = sum((r - min(shrink * r, limit) for r, _ in group), Fraction(0)) / group_size
        exact += math.prod((p for _, p in group), start=Fraction(1)) * lost
    limit_bound = bounds.member_limit_bound(variance(law), group_size, 0.2, float(limit))
    assert float(exact) <= limit_bound + 1e-12


@pytest.mark.parametrize(
    ("low", "high"),
    [
        # c ± √(v + ε²) with v + ε² = 1/4 and 1; then v > 1 + 2ε: atoms at 0 and 1 + v.
        (Fraction(7, 10), Fraction(17, 10)),
        (Fraction(1, 5), Fraction(11, 5)),
        (Fraction(0), Fraction(6)),
        (Fraction(0), Fraction(100)),
    ],
)
def test_the_clip_bound_is_attained(low: Fraction, high: Fraction) -> None:
    law = two_point(low, high)
    exact = deficit(law, 1, Fraction(1, 5))
    assert bounds.tic_clip_bound(variance(law), 0.2) == pytest.approx(exact, rel=1e-12)


def test_scarf_alone_is_not_attained_by_ratios_of_large_variance() -> None:
    """Its extremal law has a negative atom there; the bound for ratios stays below 1."""
    assert bounds.scarf_bound(53.6, 1, 0.2) > 3.5
    assert bounds.deficit_bound(53.6, 1, 0.2) == pytest.approx(1 - 1.2 / 54.6)


@pytest.mark.parametrize("v", [0.01, 0.05, 0.19, 0.5, 4.0])
def test_the_mask_bound_is_approached(v: float) -> None:
    jump = 0.2 * (1 + 1e-9) if v < 0.2 else v
    chance = v / (v + jump**2)
    assert (1 + jump) * chance == pytest.approx(bounds.tic_mask_bound(v, 0.2), rel=1e-7)


@pytest.mark.parametrize(("group_size", "expected"), [(4, 0.9999), (16, 0.9998), (64, 0.9990)])
def test_the_constant_one_quarter_cannot_be_improved(group_size: int, expected: float) -> None:
    """E6: ρ = 1 + 2Gε with probability 1e-5."""
    chance, jump = 1e-5, 2 * group_size * 0.2
    low = 1 - chance * jump / (1 - chance)
    exact = sum(
        math.comb(group_size, k)
        * chance**k
        * (1 - chance) ** (group_size - k)
        * max(0.0, (k * (1 + jump) + (group_size - k) * low) / group_size - 1.2)
        for k in range(1, group_size + 1)
    )
    v = jump**2 * chance + (1 - low) ** 2 * (1 - chance)
    ratio = exact / bounds.variance_bound(v, group_size, 0.2)
    assert ratio == pytest.approx(expected, abs=1e-4)


def test_bernstein_is_the_integral() -> None:
    t = np.linspace(0.2, 60, 2_000_001)
    integrand = np.exp(-16 * t**2 / (2 * (2.0 + 5 * t / 3)))
    expected = float(np.trapezoid(integrand, t))
    assert bounds.bernstein_bound(2.0, 16, 0.2, 5.0) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("variance_", "expected"),
    [(math.expm1(0.25), 6), (math.expm1(1), 35), (math.expm1(2.25), 170), (math.expm1(4), 1072)],
)
def test_the_sufficient_group_is_the_least(variance_: float, expected: int) -> None:
    assert bounds.sufficient_group_size(variance_, 0.2, 0.05) == expected
    assert bounds.scarf_bound(variance_, expected, 0.2) <= 0.05
    assert bounds.scarf_bound(variance_, expected - 1, 0.2) > 0.05


def test_faulty_values_are_named() -> None:
    with pytest.raises(ValueError, match="variance must be finite and at least 0, got -1"):
        bounds.scarf_bound(-1, 8, 0.2)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        bounds.deficit_bound(1, 0, 0.2)
    with pytest.raises(ValueError, match="epsilon must be finite and above 0, got 0"):
        bounds.variance_bound(1, 8, 0)
    with pytest.raises(ValueError, match=r"member_limit must be .* the cap 1\.2, got 1"):
        bounds.member_limit_bound(1, 8, 0.2, 1.0)
    with pytest.raises(ValueError, match=r"largest_ratio must be at least 1, .* got 0\.5"):
        bounds.bernstein_bound(1, 8, 0.2, 0.5)
    with pytest.raises(ValueError, match="deficit must be between 0 and 1, got 1"):
        bounds.sufficient_group_size(1, 0.2, 1.0)
