"""The bandit's exact moments against loops over groups written without tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megatron_gmc.estimators import GMC, NoCorrection, PlainIS, TICClip, TICMask
from megatron_gmc.theory import bounds
from megatron_gmc.theory.bandit import Bandit, enumerate_groups, exact_deficit, exact_moments

LOGITS, BEHAVIOUR, REWARD = [1.2, 0.3, -0.9], [-0.2, 0.9, 0.2], [1.0, 0.2, 0.0]


def bandit() -> Bandit:
    return Bandit(*(torch.tensor(x, dtype=torch.float64) for x in (LOGITS, BEHAVIOUR, REWARD)))


def softmax(logits: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def test_moments_of_gmc_by_plain_loops() -> None:
    policy, behaviour = softmax(LOGITS), softmax(BEHAVIOUR)
    mean, square, lost = [0.0] * 3, 0.0, 0.0
    for group in itertools.product(range(3), repeat=3):
        chance = math.prod(behaviour[a] for a in group)
        ratio = [policy[a] / behaviour[a] for a in group]
        shrink = min(1.0, 1.2 / (sum(ratio) / 3))
        rest = [sum(REWARD[b] for b in group) - REWARD[a] for a in group]
        push = [
            r * shrink * (REWARD[a] - o / 2) / 3 for a, r, o in zip(group, ratio, rest, strict=True)
        ]
        gradient = [
            sum(p * ((a == k) - policy[k]) for p, a in zip(push, group, strict=True))
            for k in range(3)
        ]
        mean = [m + chance * g for m, g in zip(mean, gradient, strict=True)]
        square += chance * sum(g * g for g in gradient)
        lost += chance * sum(r * (1 - shrink) for r in ratio) / 3
    moments = exact_moments(bandit(), GMC(), 3)
    exact = [p * (r - sum(map(math.prod, zip(policy, REWARD, strict=True)))) for p, r in
             zip(policy, REWARD, strict=True)]  # fmt: skip
    bias = [m - e for m, e in zip(mean, exact, strict=True)]
    assert moments.bias.tolist() == pytest.approx(bias, abs=1e-14)
    assert moments.second_moment == pytest.approx(square, rel=1e-12)
    assert moments.distance == pytest.approx(lost, rel=1e-12)
    assert moments.weight == pytest.approx(1 - lost, rel=1e-12)
    assert exact_deficit(bandit(), 3, 0.2) == pytest.approx(lost, rel=1e-12)


def test_the_gradient_is_that_of_the_value() -> None:
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    reward = torch.tensor(REWARD, dtype=torch.float64)
    (expected,) = torch.autograd.grad(logits.softmax(0) @ reward, logits)
    assert torch.allclose(bandit().gradient, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("group_size", [2, 3, 5, 8])
def test_plain_ratios_with_leave_one_out_are_unbiased(group_size: int) -> None:
    """E7."""
    assert exact_moments(bandit(), PlainIS(), group_size).bias_norm < 1e-12


def test_a_group_of_one_is_tic_clip() -> None:
    gmc, clip = (exact_moments(bandit(), method, 1) for method in (GMC(), TICClip()))
    assert torch.allclose(gmc.bias, clip.bias, rtol=0, atol=1e-15)
    assert gmc.second_moment == pytest.approx(clip.second_moment, rel=1e-14)


@pytest.mark.parametrize("method", [TICClip(), TICMask(), NoCorrection()])
def test_weights_of_single_trajectories_have_one_bias_at_every_group_size(
    method: TICClip | TICMask | NoCorrection,
) -> None:
    """E7."""
    first, *others = (exact_moments(bandit(), method, g).bias for g in (2, 3, 6))
    assert first.norm() > 0.01
    assert all(torch.allclose(first, other, rtol=0, atol=1e-13) for other in others)


def test_the_bias_of_gmc_falls_with_the_group_and_stays_under_the_bound() -> None:
    """E7; |A| ≤ 1 and ‖S‖ ≤ √2, so B = √2."""
    case = bandit()
    biases = []
    for size in (2, 3, 5, 8):
        moments = exact_moments(case, GMC(), size)
        limit = bounds.deficit_bound(case.chi_square, size, 0.2)
        assert moments.bias_norm <= math.sqrt(2) * moments.distance
        assert moments.distance <= limit
        assert moments.largest <= 1.2 * math.sqrt(2)
        biases.append(moments.bias_norm)
    assert biases == sorted(biases, reverse=True)


def test_an_enumeration_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group_size: 4\^16 groups are more than"):
        enumerate_groups(4, 16)
