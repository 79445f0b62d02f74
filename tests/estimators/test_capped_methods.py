"""gmc with a member limit, its ablations, and gepo: what sets each apart."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron_gmc.estimators import (
    ESTIMATORS,
    GEPO,
    GMC,
    GSPO,
    MIS,
    GMCDifferentiable,
    GMCPooled,
    TICClip,
    TICMask,
    TISSequence,
    TrajectoryEstimator,
    log_mass,
)
from tests.estimators import oracle
from tests.estimators.records import double, parameters, trajectory_ratios

CAP = 1.2
groups_of_log_ratios = st.lists(
    st.lists(st.floats(-60, 60) | st.floats(-2, 2), min_size=1, max_size=6), min_size=1, max_size=5
)


def flatten(groups: list[list[float]]) -> tuple[list[float], list[int]]:
    flat = [(r, g) for g, members in enumerate(groups) for r in members]
    return [r for r, _ in flat], [g for _, g in flat]


@settings(deadline=None, max_examples=150)
@given(
    groups=st.lists(
        st.lists(
            st.floats(-1e3, 1e3) | st.floats(-2, 2) | st.just(-math.inf), min_size=1, max_size=6
        ),
        min_size=1,
        max_size=4,
    ),
    epsilon=st.floats(0.01, 3),
    limit=st.sampled_from([None, 4.0, "G^0.33"]),
)
@example(groups=[[709.7, 709.7], [0.0]], epsilon=0.2, limit=None)
@example(groups=[[709.7, -3.0], [709.0]], epsilon=0.2, limit=None)
def test_the_short_way_to_gmcs_weights_is_the_long_one(
    groups: list[list[float]], epsilon: float, limit: float | str | None
) -> None:
    flat, index = flatten(groups)
    estimator = GMC(epsilon=epsilon, member_limit=limit)
    ratios = trajectory_ratios(flat, index)
    weight_N = estimator.weights(ratios)
    assert weight_N.tolist() == pytest.approx(
        estimator.log_weights(ratios).exp().tolist(), rel=1e-11, abs=1e-300
    )


@pytest.mark.parametrize("limit", [4.0, "G^0.33", "G^0.9"])
@settings(deadline=None, max_examples=100)
@given(groups=groups_of_log_ratios)
def test_member_limits_against_decimal_arithmetic(
    limit: float | str, groups: list[list[float]]
) -> None:
    flat, index = flatten(groups)
    estimator = GMC(member_limit=limit)
    weights = estimator.weights(trajectory_ratios(flat, index)).tolist()
    members = [oracle.Member(r) for r in flat]
    expected = oracle.trajectory_weights("gmc", parameters(estimator), members, index)
    assert weights == pytest.approx(expected, rel=1e-11, abs=1e-300)


@settings(deadline=None, max_examples=100)
@given(groups=groups_of_log_ratios, limit=st.floats(CAP, 50))
def test_a_member_limit_bounds_weights_and_bias(groups: list[list[float]], limit: float) -> None:
    """Prop. 7 (i), (ii): w ≤ b, mean w ≤ c, and D ≤ (M − c)₊ + mean of (ρ − b)₊."""
    flat, index = flatten(groups)
    ratios = trajectory_ratios(flat, index)
    weight_N = GMC(member_limit=limit).weights(ratios)
    ratio_N = double(flat).exp()
    assert bool((weight_N <= limit).all())
    for group, members in enumerate(groups):
        chosen_N = ratios.group_N == group
        weight, ratio = weight_N[chosen_N], ratio_N[chosen_N]
        assert float(weight.mean()) <= CAP * (1 + 1e-10)
        bound = max(float(ratio.mean()) - CAP, 0.0) + float((ratio - limit).clamp(min=0).mean())
        assert float((ratio - weight).abs().mean()) <= bound * (1 + 1e-9) + 1e-12, members


def test_the_ends_of_the_member_limit() -> None:
    """b = cG is gmc alone; b = c is TIC-clip after gmc; a group of one has at least c."""
    ratios = trajectory_ratios([2.0, 0.3, -1.0, 0.5], [0, 0, 0, 1])
    plain = GMC().weights(ratios)
    assert torch.equal(GMC(member_limit=3 * CAP).weights(ratios), plain)
    torch.testing.assert_close(GMC(member_limit=CAP).weights(ratios), plain.clamp(max=CAP))
    assert GMC(member_limit="G^0.33").weights(ratios).tolist() == pytest.approx(
        [3**0.33, *plain[1:].tolist()]
    )


def projected(method: str, ratios: list[float]) -> list[float]:
    estimator = ESTIMATORS[method]()
    assert isinstance(estimator, TrajectoryEstimator)
    record = trajectory_ratios([math.log(r) for r in ratios])
    return estimator.weights(record).tolist()


capped_ratios = st.lists(st.floats(0.01, 20), min_size=2, max_size=6).filter(
    lambda ratios: sum(ratios) / len(ratios) > CAP * 1.01
)


@settings(deadline=None, max_examples=150)
@given(capped_ratios)
def test_water_filling_has_the_least_second_moment(ratios: list[float]) -> None:
    """Prop. 3, by its optimality conditions: mean c, 0 ≤ w ≤ ρ, and w = κ wherever w < ρ ≥ κ."""
    weights = projected("water_filling", ratios)
    assert sum(weights) / len(weights) == pytest.approx(CAP, rel=1e-12)
    level = max(weights)
    assert level >= CAP * (1 - 1e-12)
    assert weights == pytest.approx([min(r, level) for r in ratios], rel=1e-12)


@settings(deadline=None, max_examples=150)
@given(capped_ratios)
def test_soft_threshold_is_the_euclidean_projection(ratios: list[float]) -> None:
    """Prop. 3, by its variational inequality: (ρ − w)·(v − w) ≤ 0 for all v ≥ 0 of mean c.

    It is linear in v, so the vertices (all mass on one member) are enough.
    """
    weights = projected("soft_threshold", ratios)
    total = CAP * len(ratios)
    assert sum(weights) == pytest.approx(total, rel=1e-12)
    assert all(0 <= w <= r * (1 + 1e-12) for w, r in zip(weights, ratios, strict=True))
    for vertex in range(len(ratios)):
        product = sum(
            (r - w) * ((total if i == vertex else 0.0) - w)
            for i, (r, w) in enumerate(zip(ratios, weights, strict=True))
        )
        assert product <= 1e-9


@settings(deadline=None, max_examples=100)
@given(capped_ratios, st.sampled_from(["water_filling", "soft_threshold"]))
def test_both_lose_the_least_mass(ratios: list[float], method: str) -> None:
    """Prop. 3: they, too, have D = (M − c)₊."""
    weights = projected(method, ratios)
    distance = sum(abs(r - w) for r, w in zip(ratios, weights, strict=True)) / len(ratios)
    assert distance == pytest.approx(sum(ratios) / len(ratios) - CAP, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("method", ["water_filling", "soft_threshold"])
def test_projections_of_what_no_float_holds(method: str) -> None:
    """Two equal giants share the group; a gap of 1 in the log leaves one of them all of it."""
    ratios = trajectory_ratios([1e4, 1e4, 0.0, 2e4, 2e4 - 1], [0, 0, 0, 1, 1])
    estimator = ESTIMATORS[method]()
    assert isinstance(estimator, TrajectoryEstimator)
    weights = estimator.weights(ratios).tolist()
    if method == "water_filling":
        assert weights == pytest.approx([1.3, 1.3, 1.0, 1.2, 1.2])
    else:
        assert weights == pytest.approx([1.8, 1.8, 0.0, 2.4, 0.0])


def test_the_pool_is_the_batch() -> None:
    """Masses 2 and 0.2: the batch's is 1.1, below the cap, and 1.5 with the first group alone."""
    log_ratios = [math.log(r) for r in (3.0, 1.0, 0.1, 0.3)]
    ratios = trajectory_ratios(log_ratios, [0, 0, 1, 1])
    assert GMCPooled().weights(ratios).tolist() == pytest.approx([3.0, 1.0, 0.1, 0.3])
    assert GMCPooled(epsilon=0.05).weights(ratios).tolist() == pytest.approx(
        [r * 1.05 / 1.1 for r in (3.0, 1.0, 0.1, 0.3)]
    )
    first = trajectory_ratios(log_ratios[:2])
    assert torch.equal(GMCPooled().log_weights(first), GMC().log_weights(first))


@settings(deadline=None, max_examples=100)
@given(groups=groups_of_log_ratios, seed=st.integers(0, 1000))
def test_differentiable_gmc_is_autograd_of_its_own_objective(
    groups: list[list[float]], seed: int
) -> None:
    """E8: d/dℓ of Σ ρ min(1, c/M) A, with the weight inside the graph."""
    flat, index = flatten([[r / 20 for r in members] for members in groups])
    mass_P = log_mass(double(flat), torch.tensor(index), len(groups)).exp()
    assume(all(abs(m - CAP) > 1e-6 for m in mass_P.tolist()))
    advantages = torch.randn(len(flat), generator=torch.Generator().manual_seed(seed)).double()
    log_ratio_N = double(flat).requires_grad_()
    objective = torch.zeros((), dtype=torch.float64)
    for group in range(len(groups)):
        chosen = [i for i, g in enumerate(index) if g == group]
        ratio = log_ratio_N[chosen].exp()
        objective = (
            objective + (ratio * (CAP / ratio.mean()).clamp(max=1) * advantages[chosen]).sum()
        )
    (expected,) = torch.autograd.grad(objective, log_ratio_N)
    found = GMCDifferentiable().coefficients(trajectory_ratios(flat, index, advantages))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_differentiable_gmc_at_the_ends() -> None:
    ratios = trajectory_ratios(
        [-math.inf, -math.inf, 1000.0, 0.0], [0, 0, 1, 1], advantages=[1.0, -1.0, 0.0, 0.0]
    )
    assert GMCDifferentiable().coefficients(ratios).tolist() == [0, 0, 0, 0]


def test_the_sequence_methods_are_the_papers_under_other_names() -> None:
    ratios = trajectory_ratios([math.log(r) for r in (0.3, 1.1, 1.9, 2.1, 40.0)])
    assert torch.equal(TISSequence(cap=2.0).weights(ratios), TICClip(epsilon=1.0).weights(ratios))
    assert torch.equal(MIS(upper=2.0).weights(ratios), TICMask(epsilon=1.0).weights(ratios))
    assert MIS(upper=2.0, lower=0.5).weights(ratios).tolist() == pytest.approx([0, 1.1, 1.9, 0, 0])


@pytest.mark.parametrize("name", ["gspo", "gepo"])
@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(
        st.tuples(
            st.floats(-4, 4), st.integers(1, 5), st.sampled_from([-1.0, 0.5]), st.floats(-6, 0)
        ),
        min_size=1,
        max_size=6,
    )
)
def test_length_normalised_methods_are_the_gradient_of_their_surrogate(
    name: str, rows: list[tuple[float, int, float, float]]
) -> None:
    """min(sA, clip(s)A) by autograd, s written in plain probabilities; times |y| for our ∇."""
    log_ratios, tokens, advantages, behaviour = (list(column) for column in zip(*rows, strict=True))
    wide = {"clip_low": 0.3, "clip_high": 0.4}
    estimator = (GSPO if name == "gspo" else GEPO)(**wide)
    log_ratio_N = double(log_ratios).requires_grad_()
    count_N, q_N = double(tokens), (double(behaviour) / double(tokens)).exp()
    p_N = ((double(behaviour) + log_ratio_N) / count_N).exp()
    s_N = p_N / q_N if name == "gspo" else p_N / (q_N.square().sum() / q_N.sum())
    assume(all(abs(s - edge) > 1e-9 for s in s_N.tolist() for edge in (0.7, 1.4)))
    advantage_N = double(advantages)
    surrogate = torch.minimum(s_N * advantage_N, s_N.clamp(0.7, 1.4) * advantage_N)
    (gradient,) = torch.autograd.grad(surrogate.sum(), log_ratio_N)
    ratios = trajectory_ratios(
        log_ratios, advantages=advantage_N, tokens=tokens, behaviour=behaviour
    )
    torch.testing.assert_close(
        estimator.coefficients(ratios), gradient * count_N, rtol=1e-10, atol=1e-13
    )


def test_gepo_without_lag_weights_by_probability() -> None:
    """Geometric means 1/2 and 1/4: their expectation is 5/12, so 6/5 and 3/5, no other method's."""
    ratios = trajectory_ratios(
        [0.0, 0.0], tokens=[2, 1], behaviour=[-2 * math.log(2), -math.log(4)]
    )
    weights = GEPO(clip_high=0.3, clip_low=0.5).weights(ratios).tolist()
    assert weights == pytest.approx([6 / 5, 3 / 5])
