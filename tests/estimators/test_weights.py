"""Trajectory methods: closed forms, an oracle in decimals, and what must not vary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron_gmc.estimators import ESTIMATORS, GMC, TICClip, TICMask, TrajectoryEstimator
from megatron_gmc.estimators.ratios import log_mass, trajectory_sums
from tests.estimators import oracle
from tests.estimators.records import (
    BOUNDED_METHODS,
    INDEPENDENT_METHODS,
    TRAJECTORY_METHODS,
    double,
    parameters,
    trajectory_ratios,
    with_cap,
)

INF = math.inf
NAN = math.nan

log_ratios = st.floats(-60, 60) | st.floats(-2, 2)
groups_of_log_ratios = st.lists(
    st.lists(log_ratios, min_size=1, max_size=6), min_size=1, max_size=5
)


def make(method: str, **params: float) -> TrajectoryEstimator:
    estimator = ESTIMATORS[method](**params)
    assert isinstance(estimator, TrajectoryEstimator)
    return estimator


def flatten(groups: list[list[float]]) -> tuple[list[float], list[int]]:
    flat = [(r, g) for g, members in enumerate(groups) for r in members]
    return [r for r, _ in flat], [g for _, g in flat]


def test_large_log_ratios_keep_their_proportions() -> None:
    """R1: clamping ℓ at 20 before the mass would give (2.4, 2.4, 0, 0)."""
    weights = GMC(epsilon=0.2).weights(trajectory_ratios([40, 25, 0, 0])).tolist()
    assert weights == pytest.approx([4.79999853, 1.468331e-6, 2.0392e-17, 2.0392e-17], rel=1e-4)
    assert weights[0] == pytest.approx(4.79999853, abs=5e-9)


def test_a_long_response_in_float32() -> None:
    """R2: 32,768 tokens at ±0.02: finite weights whose mean is the cap."""
    value_K = torch.tensor([0.02, -0.02, 0.0, 0.0]).repeat_interleave(32768)
    log_ratio_N = trajectory_sums(value_K, torch.arange(4).repeat_interleave(32768), 4)
    weight_N = GMC(epsilon=0.2).weights(trajectory_ratios(log_ratio_N))
    assert bool(weight_N.isfinite().all())
    assert float(weight_N.mean()) == pytest.approx(1.2, rel=1e-12)
    assert float(weight_N[0]) == pytest.approx(4.8, rel=1e-12)


@pytest.mark.parametrize("method", TRAJECTORY_METHODS)
def test_a_ratio_of_zero_has_weight_zero(method: str) -> None:
    """R3: alone at −inf, all of a group at −inf; nobody else's weight becomes NaN."""
    ratios = trajectory_ratios([-INF, -INF, -INF, 0.0], groups=[0, 0, 1, 1])
    weights = make(method).weights(ratios).tolist()
    assert weights[:3] == [0, 0, 0]
    # Group 1 has M = 1/2, below the cap, and self-normalisation doubles it.
    assert weights[3] == pytest.approx(2 if method == "snis" else 1, rel=1e-14)


@pytest.mark.parametrize("method", INDEPENDENT_METHODS)
def test_nan_comes_out_as_nan_in_its_own_group_alone(method: str) -> None:
    ratios = trajectory_ratios([NAN, 0.0, 0.1, 0.0], groups=[0, 0, 1, 1])
    weights = make(method).weights(ratios).tolist()
    assert math.isnan(weights[0])
    assert not any(math.isnan(w) for w in weights[2:])


@pytest.mark.parametrize("log_ratio", [-3.0, 0.0, 0.1, 5.0, 1000.0])
def test_a_group_of_one_is_tic_clip(log_ratio: float) -> None:
    """G2: min(ρ, c)."""
    ratios = trajectory_ratios([log_ratio])
    expected = 1.2 if log_ratio > math.log(1.2) else math.exp(log_ratio)
    assert GMC().weights(ratios).tolist() == pytest.approx([expected], rel=1e-14)
    assert TICClip().weights(ratios).tolist() == pytest.approx([expected], rel=1e-14)


@pytest.mark.parametrize("method", TRAJECTORY_METHODS)
def test_without_lag_every_weight_is_one(method: str) -> None:
    """Falsification 1: τ = 0 is the on-policy update, bit for bit (gepo: of equal probability)."""
    ratios = trajectory_ratios([0.0] * 7, groups=[0, 0, 1, 1, 1, 0, 2])
    assert make(method).weights(ratios).tolist() == [1.0] * 7


EDGES = {"mis": (2.0, 0.5), "gspo": (1 + 4e-4, 1 - 3e-4), "gepo": (1.2, 0.8)}
"""Where a weight jumps, besides at a cap."""


@pytest.mark.parametrize("method", TRAJECTORY_METHODS)
@settings(deadline=None, max_examples=100)
@given(
    groups=groups_of_log_ratios, epsilon=st.floats(0.01, 3), advantage=st.sampled_from([1.0, -1.0])
)
@example(groups=[[700.0, -700.0], [0.0], [709.0, 709.0, 1.0]], epsilon=0.2, advantage=1.0)
def test_against_decimal_arithmetic(
    method: str, groups: list[list[float]], epsilon: float, advantage: float
) -> None:
    flat, index = flatten(groups)
    estimator = make(method)
    if estimator.epsilon is not None:
        estimator = make(method, epsilon=epsilon)
    edges = [math.log(edge) for edge in EDGES.get(method, (1 + epsilon,))]
    assume(all(abs(r - edge) > 1e-9 for r in flat for edge in edges))
    n = len(flat)
    weights = estimator.weights(trajectory_ratios(flat, index, advantages=[advantage] * n))
    assert weights.dtype == torch.float64
    members = [oracle.Member(r, advantage=advantage) for r in flat]
    # A projection takes differences of numbers of the size of c times the group's.
    tolerance = 1e-12 if method == "soft_threshold" else 1e-300
    assert weights.tolist() == pytest.approx(
        oracle.trajectory_weights(method, parameters(estimator), members, index),
        rel=1e-11,
        abs=tolerance * (1 + epsilon) * n,
    )


@settings(deadline=None, max_examples=150)
@given(groups=groups_of_log_ratios, epsilon=st.floats(0.01, 3))
def test_gmc_below_the_cap_is_plain_importance_sampling(
    groups: list[list[float]], epsilon: float
) -> None:
    """Falsification 3 and 5: w = ρ if M ≤ c, and w/ρ is one number for each group anyway."""
    flat, index = flatten(groups)
    ratios = trajectory_ratios(flat, index)
    log_shrink_N = GMC(epsilon=epsilon).log_weights(ratios) - ratios.log_ratio_N
    capped_P = log_mass(ratios.log_ratio_N, ratios.group_N, ratios.groups) > math.log1p(epsilon)
    for group, capped in enumerate(capped_P.tolist()):
        members = log_shrink_N[ratios.group_N == group]
        assert float(members.max() - members.min()) <= 1e-13
        assert bool((members < 0).all()) if capped else bool((members == 0).all())


@pytest.mark.parametrize("method", BOUNDED_METHODS)
@settings(deadline=None, max_examples=150)
@given(
    groups=st.lists(
        st.lists(st.floats(-1e5, 1e5) | st.floats(-2, 2), min_size=1, max_size=8), min_size=1
    ),
    epsilon=st.floats(0.01, 3),
)
def test_the_class_bounds(method: str, groups: list[list[float]], epsilon: float) -> None:
    """Falsification 4: mean(w) ≤ c in each group, so no w exceeds cG; finite for any finite ℓ."""
    flat, index = flatten(groups)
    ratios = trajectory_ratios(flat, index)
    weight_N = with_cap(method, 1 + epsilon).weights(ratios)
    assert bool(weight_N.isfinite().all())
    assert bool((weight_N >= 0).all())
    for group in range(ratios.groups):
        assert float(weight_N[ratios.group_N == group].mean()) <= (1 + epsilon) * (1 + 1e-10)


@pytest.mark.parametrize("method", INDEPENDENT_METHODS)
@settings(deadline=None, max_examples=50)
@given(groups=groups_of_log_ratios, seed=st.integers(0, 2**31))
def test_order_and_company_do_not_matter(method: str, groups: list[list[float]], seed: int) -> None:
    """Falsification 6 and 7: permuting permutes, and other groups in the call change nothing."""
    flat, index = flatten(groups)
    estimator = make(method)
    together = estimator.weights(trajectory_ratios(flat, index))
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed))
    shuffled = estimator.weights(
        trajectory_ratios(double(flat)[order], torch.tensor(index)[order].tolist())
    )
    atol = 1e-12 if method == "soft_threshold" else 0
    torch.testing.assert_close(shuffled, together[order], rtol=1e-12, atol=atol)
    apart = [estimator.weights(trajectory_ratios(members)) for members in groups]
    torch.testing.assert_close(torch.cat(apart), together, rtol=1e-12, atol=atol)


def test_a_constant_in_every_behaviour_log_prob() -> None:
    """Falsification 8: it moves M, and once the group is capped it does not move w."""
    log_ratio_N = double([1.0, 0.5, -0.3, 2.0])
    base = GMC().weights(trajectory_ratios(log_ratio_N))
    shifted = GMC().weights(trajectory_ratios(log_ratio_N + 50))
    torch.testing.assert_close(shifted, base, rtol=1e-13, atol=0)
    below = GMC().weights(trajectory_ratios(log_ratio_N - 50))
    torch.testing.assert_close(below, (log_ratio_N - 50).exp(), rtol=1e-13, atol=0)


def test_cap_and_mask_part_ways_above_the_cap() -> None:
    ratios = trajectory_ratios([math.log(0.5), math.log(1.1), math.log(1.5)])
    assert TICClip(epsilon=0.2).weights(ratios).tolist() == pytest.approx([0.5, 1.1, 1.2])
    assert TICMask(epsilon=0.2).weights(ratios).tolist() == pytest.approx([0.5, 1.1, 0.0])


@pytest.mark.parametrize("method", TRAJECTORY_METHODS)
def test_weights_are_detached(method: str) -> None:
    """Falsification 9, from a record whose log-ratios were not."""
    log_ratio_N = double([0.5, 1.0]).requires_grad_()
    ratios = trajectory_ratios(log_ratio_N)
    assert not make(method).weights(ratios).requires_grad
    assert not make(method).coefficients(ratios).requires_grad


def test_plain_importance_sampling_leaves_float64_openly() -> None:
    weights = make("is").weights(trajectory_ratios([709.0, 710.0])).tolist()
    assert weights[0] == pytest.approx(math.exp(709))
    assert weights[1] == INF


@pytest.mark.parametrize("method", [m for m in TRAJECTORY_METHODS if m != "gmc_differentiable"])
def test_coefficients_are_weight_times_advantage(method: str) -> None:
    """R5: exactly 0 where the advantage is, whatever the weight."""
    ratios = trajectory_ratios([1000.0, 0.1, 0.3], groups=[0, 1, 1], advantages=[0.0, -2.0, 0.5])
    weights = make(method).weights(ratios).tolist()
    coefficients = make(method).coefficients(ratios).tolist()
    assert coefficients == [0.0, -2.0 * weights[1], 0.5 * weights[2]]


def test_a_nan_weight_is_not_hidden_by_an_advantage_of_zero() -> None:
    ratios = trajectory_ratios([NAN, 0.0], advantages=[0.0, 0.0])
    assert math.isnan(GMC().coefficients(ratios).tolist()[0])
