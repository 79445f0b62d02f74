"""What the propositions say of these weights, by enumeration, vertices and closed forms."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_gmc.estimators import (
    ESTIMATORS,
    GMC,
    AdvantageKind,
    TrajectoryEstimator,
    TrajectoryRatios,
    advantages,
    log_mass,
    trajectory_sums,
)
from tests.estimators.records import BOUNDED_METHODS, trajectory_ratios, with_cap

CAP = 1.2


def weights_of(method: str, ratios: TrajectoryRatios) -> Tensor:
    estimator = ESTIMATORS[method]()
    assert isinstance(estimator, TrajectoryEstimator)
    return estimator.weights(ratios)


def least_distance(ratios: list[Fraction], cap: Fraction) -> Fraction:
    """min (1/G)Σ|ρ_i − w_i| over (1/G)Σ|w_i| ≤ c, a linear programme, by its vertices.

    Σ|ρ − w| is linear between the planes w_i = 0 and w_i = ρ_i, so its least value over the ball
    is at a point where all coordinates but one are 0 or ρ_i, and that one is 0, ρ_i or what
    Σ|w| = Gc leaves for it.
    """
    size = len(ratios)
    best = None
    for free in range(size):
        for kept in itertools.product((0, 1), repeat=size):
            w = [ratio * keep for ratio, keep in zip(ratios, kept, strict=True)]
            w[free] = Fraction(0)
            left = size * cap - sum(w)
            if left < 0:
                continue
            for value in (Fraction(0), ratios[free], left, -left):
                w[free] = value
                distance = sum(abs(r - x) for r, x in zip(ratios, w, strict=True)) / size
                if abs(value) <= left:
                    best = distance if best is None else min(best, distance)
    assert best is not None
    return best


@settings(deadline=None, max_examples=100)
@given(st.lists(st.fractions(0, 8, max_denominator=50), min_size=1, max_size=4))
def test_no_weights_in_the_class_come_closer_than_gmc(ratios: list[Fraction]) -> None:
    """Prop. 1, E2: D = (M − c)₊ is the optimum of the linear programme."""
    cap = Fraction(6, 5)
    optimum = least_distance(ratios, cap)
    assert optimum == max(sum(ratios, Fraction(0)) / len(ratios) - cap, Fraction(0))
    record = trajectory_ratios([math.log(r) if r else -math.inf for r in ratios])
    weight_N = weights_of("gmc", record)
    distance = float((record.log_ratio_N.exp() - weight_N).abs().mean())
    assert distance == pytest.approx(float(optimum), abs=1e-12)


@pytest.mark.parametrize("method", BOUNDED_METHODS)
def test_group_by_group_no_other_method_comes_closer(method: str) -> None:
    """Prop. 4, E2: in 20,000 groups of eight, and TIC-clip is strictly further in many."""
    generator = torch.Generator().manual_seed(1)
    log_ratio_N = torch.randn(160_000, generator=generator, dtype=torch.float64)
    group_N = torch.arange(20_000).repeat_interleave(8)
    ratios = trajectory_ratios(log_ratio_N, group_N.tolist())
    distance_P = (
        (log_ratio_N.exp() - with_cap(method, CAP).weights(ratios)).abs().view(-1, 8).mean(1)
    )
    deficit_P = (log_ratio_N.exp().view(-1, 8).mean(1) - CAP).clamp(min=0)
    assert bool((distance_P >= deficit_P - 1e-12).all())
    strictly = float((distance_P > deficit_P + 1e-9).double().mean())
    optimal = ("gmc", "water_filling", "soft_threshold")
    assert strictly == 0 if method in optimal else strictly > 0.5


def normal_cdf(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def lognormal_ratios(sigma: float, size: int, groups: int) -> TrajectoryRatios:
    """E ρ = 1, sd(ℓ) = sigma."""
    generator = torch.Generator().manual_seed(size)
    normal_N = torch.randn(groups * size, generator=generator, dtype=torch.float64)
    group_N = torch.arange(groups).repeat_interleave(size)
    return TrajectoryRatios(
        sigma * normal_N - sigma**2 / 2,
        group_N,
        torch.ones(groups * size),
        torch.ones_like(group_N),
        groups,
    )


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_lost_mass_of_trajectory_wise_capping_in_closed_form(sigma: float) -> None:
    """E1, E15: 1 − E w is Φ(d₁) − cΦ(d₁−σ) for the clip, Φ(d₁) for the mask; |z| < 4.5."""
    ratios = lognormal_ratios(sigma, 1, 400_000)
    d1 = (sigma**2 / 2 - math.log(CAP)) / sigma
    for method, lost in (
        ("tic_clip", normal_cdf(d1) - CAP * normal_cdf(d1 - sigma)),
        ("tic_mask", normal_cdf(d1)),
    ):
        weight_N = weights_of(method, ratios)
        error = float(weight_N.std()) / math.sqrt(len(weight_N))
        assert abs(float(weight_N.mean()) - (1 - lost)) < 4.5 * error, method


@pytest.mark.parametrize(
    ("sigma", "size", "lost"),
    [(0.5, 4, 0.0411), (0.5, 16, 0.0057), (1, 4, 0.1627), (1, 8, 0.1033), (1, 16, 0.0602),
     (2, 8, 0.382)],
)  # fmt: skip
def test_lost_mass_of_gmc_falls_with_the_group(sigma: float, size: int, lost: float) -> None:
    """E5: 1 − E min(M, c), the table of simulated values, each good to 2e-3; Prop. 6 bounds it."""
    weight_P = weights_of("gmc", lognormal_ratios(sigma, size, 40_000)).view(-1, size).mean(1)
    error = float(weight_P.std()) / math.sqrt(len(weight_P))
    measured = 1 - float(weight_P.mean())
    assert abs(measured - lost) < 2e-3 + 4.5 * error
    variance = math.exp(sigma**2) - 1
    assert measured <= (math.sqrt(variance / size + 0.04) - 0.2) / 2 + 4.5 * error


# A bandit of three arms: every group of G draws is enumerated, so expectations are exact.
POLICY = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
BEHAVIOUR = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
REWARD = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
SCORE = torch.eye(3, dtype=torch.float64) - POLICY
TRUE_GRADIENT = (POLICY * REWARD) @ SCORE


def expected_gradient(method: str, size: int, kind: AdvantageKind = "leave_one_out") -> Tensor:
    """E ĝ over all 3^G groups, each weighted by its probability under the behaviour policy."""
    arm_PG = torch.tensor(list(itertools.product(range(3), repeat=size)))
    groups = len(arm_PG)
    group_N = torch.arange(groups).repeat_interleave(size)
    arm_N = arm_PG.flatten()
    ratios = TrajectoryRatios(
        (POLICY / BEHAVIOUR).log()[arm_N],
        group_N,
        advantages(REWARD[arm_N], group_N, groups, kind),
        torch.ones_like(arm_N),
        groups,
    )
    estimator = ESTIMATORS[method]()
    assert isinstance(estimator, TrajectoryEstimator)
    gradient_N = estimator.coefficients(ratios)[:, None] * SCORE[arm_N]
    gradient_P = gradient_N.view(groups, size, 3).mean(1)
    return BEHAVIOUR[arm_PG].prod(1) @ gradient_P


@pytest.mark.parametrize("size", [2, 3, 5])
def test_plain_importance_sampling_is_unbiased(size: int) -> None:
    """E7: exactly ∇J with leave-one-out (dyadic rewards, so float32 holds the advantages)."""
    torch.testing.assert_close(expected_gradient("is", size), TRUE_GRADIENT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_group_mean_shrinks_the_target(size: int) -> None:
    """(1 − 1/G)∇J, to float32's advantages."""
    torch.testing.assert_close(
        expected_gradient("is", size, "group_mean"),
        (1 - 1 / size) * TRUE_GRADIENT,
        rtol=1e-6,
        atol=1e-8,
    )


def test_bias_falls_with_the_group_for_gmc_alone() -> None:
    """E7: GMC's falls in G; TIC's is the same at every G, the mask's the larger of the two."""
    bias = {
        method: [
            float((expected_gradient(method, size) - TRUE_GRADIENT).norm()) for size in (2, 3, 5)
        ]
        for method in ("gmc", "tic_clip", "tic_mask")
    }
    assert bias["gmc"][0] > bias["gmc"][1] > bias["gmc"][2]
    for method in ("tic_clip", "tic_mask"):
        assert bias[method] == pytest.approx([bias[method][0]] * 3, abs=1e-12)
    assert bias["gmc"][0] < bias["tic_clip"][0] < bias["tic_mask"][0]


def test_the_mean_mass_is_one_for_log_probs_recorded_at_sampling() -> None:
    """E14, falsification 10, exactly: all 64 sequences, weights switched after the first token.

    The oldest or the newest version's log-prob for every token would not do.
    """
    generator = torch.Generator().manual_seed(0)
    current, old, new = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64).log_softmax(
        -1
    )
    token_NT = torch.tensor(list(itertools.product(range(4), repeat=3)))
    # The row of logits is the previous token's; row 4 starts a sequence.
    previous_NT = torch.cat([torch.full((64, 1), 4), token_NT[:, :-1]], dim=1)
    log_prob = {
        name: table[previous_NT, token_NT]
        for name, table in (("current", current), ("old", old), ("new", new))
    }
    recorded_NT = torch.cat([log_prob["old"][:, :1], log_prob["new"][:, 1:]], dim=1)
    probability_N = recorded_NT.sum(1).exp()
    means = {}
    for name, behaviour_NT in (("recorded", recorded_NT), *list(log_prob.items())[1:]):
        log_ratio_K = (log_prob["current"] - behaviour_NT).flatten()
        log_ratio_N = trajectory_sums(log_ratio_K, torch.arange(64).repeat_interleave(3), 64)
        mass_N = log_mass(log_ratio_N, torch.arange(64), 64).exp()
        means[name] = float(probability_N @ mass_N)
    assert means["recorded"] == pytest.approx(1, abs=1e-12)
    assert abs(means["old"] - 1) > 0.01
    assert abs(means["new"] - 1) > 0.01


def test_naive_float32_fails_where_log_space_does_not() -> None:
    """E12: |ℓ| near 500."""
    generator = torch.Generator().manual_seed(0)
    log_ratio_N = 500 * torch.randn(8000, generator=generator, dtype=torch.float64)
    ratio_PG = log_ratio_N.float().exp().view(-1, 8)
    naive_PG = ratio_PG * (CAP / ratio_PG.mean(1, keepdim=True)).clamp(max=1)
    assert float((~naive_PG.isfinite()).any(1).double().mean()) > 0.9
    group_N = torch.arange(1000).repeat_interleave(8)
    weight_N = GMC().weights(trajectory_ratios(log_ratio_N, group_N.tolist()))
    assert bool(weight_N.isfinite().all())
