"""The policy loss: selection, denominators, and a gradient that is that of fixed weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_gmc.estimators import (
    ESTIMATORS,
    AggregationKind,
    Denominator,
    TokenRatios,
    TrajectoryEstimator,
    TrajectoryRatios,
    non_finite_trajectories,
    policy_loss,
    trajectory_sums,
)
from tests.estimators.records import TRAJECTORY_METHODS, double, trajectory_ratios

AGGREGATIONS: list[AggregationKind] = ["token_sum", "trajectory_mean", "token_mean"]
INF = math.inf
NAN = math.nan

# Two groups of three and two; the first has M > c, the second does not.
LENGTHS = [3, 1, 4, 2, 2]
GROUPS = [0, 0, 0, 1, 1]
ADVANTAGES = [1.0, -0.5, 0.25, 0.0, -2.0]
VOCABULARY = 5


def trajectory_of(lengths: list[int]) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def tokens_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (sum(LENGTHS),), generator=generator)


def behaviour_of(log_prob_K: Tensor) -> Tensor:
    """Behaviour log-probs that lift group 0's ratios over the cap and lower group 1's."""
    shift_N = double([0.8, 0.1, 0.3, -0.1, -0.2])
    return log_prob_K.detach() - shift_N[trajectory_of(LENGTHS)]


def coefficients(method: str, log_ratio_K: Tensor) -> Tensor:
    """[K], from log-ratios that may carry a graph; every behaviour probability is the same."""
    estimator = ESTIMATORS[method]()
    trajectory_K = trajectory_of(LENGTHS)
    advantage_N = double(ADVANTAGES)
    if isinstance(estimator, TrajectoryEstimator):
        sums_N = trajectory_sums(log_ratio_K, trajectory_K, len(LENGTHS))
        ratios = TrajectoryRatios(
            sums_N, torch.tensor(GROUPS), advantage_N, torch.tensor(LENGTHS), 2,
            behaviour_log_prob_N=double([0.0] * len(LENGTHS)),
        )  # fmt: skip
        return estimator.coefficients(ratios)[trajectory_K]
    return estimator.coefficients(TokenRatios(log_ratio_K, trajectory_K, advantage_N))


def loss_of(
    log_prob_K: Tensor, coefficient_K: Tensor, aggregation: AggregationKind = "token_sum"
) -> Tensor:
    return policy_loss(
        log_prob_K,
        coefficient_K,
        trajectory_of(LENGTHS),
        torch.tensor(LENGTHS),
        Denominator(trajectories=len(LENGTHS), tokens=sum(LENGTHS)),
        aggregation,
    )


@pytest.mark.parametrize("method", sorted(ESTIMATORS))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_finite_differences_at_fixed_weights(method: str, aggregation: AggregationKind) -> None:
    """R6, falsification 9: with the weights formed inside the graph, none of it reaches them."""
    token_K = tokens_of(0)
    theta = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64).requires_grad_()
    log_prob_K = theta.log_softmax(0)[token_K]
    coefficient_K = coefficients(method, log_prob_K - behaviour_of(log_prob_K))
    loss_of(log_prob_K, coefficient_K, aggregation).backward()

    step = 1e-5
    differences = []
    for moved in torch.eye(VOCABULARY, dtype=torch.float64) * step:
        ends = [
            float(loss_of((theta.detach() + s * moved).log_softmax(0)[token_K], coefficient_K,
                          aggregation))
            for s in (1, -1)
        ]  # fmt: skip
        differences.append((ends[0] - ends[1]) / (2 * step))
    assert theta.grad is not None
    assert theta.grad.abs().max() > 0.01
    assert theta.grad.tolist() == pytest.approx(differences, abs=1e-9)


def test_differentiating_the_weight_would_be_another_gradient() -> None:
    """E8: above the cap, d/dθ of w·A gives w(A − Ā_ρ)S. Detached GMC must not equal it."""
    theta = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64).requires_grad_()
    log_prob_K = theta.log_softmax(0)[tokens_of(0)]
    log_ratio_K = log_prob_K - behaviour_of(log_prob_K)
    sums_N = trajectory_sums(log_ratio_K, trajectory_of(LENGTHS), len(LENGTHS))
    rho_N = sums_N[:3].exp()
    assert float(rho_N.detach().mean()) > 1.2
    surrogate = (rho_N * 1.2 / rho_N.mean() * double(ADVANTAGES[:3])).sum()
    (moving,) = torch.autograd.grad(surrogate, theta, retain_graph=True)

    fixed_N = (rho_N * 1.2 / rho_N.mean()).detach()
    baseline = (rho_N.detach() * double(ADVANTAGES[:3])).sum() / rho_N.detach().sum()
    (predicted,) = torch.autograd.grad(
        (fixed_N * (double(ADVANTAGES[:3]) - baseline) * sums_N[:3]).sum(),
        theta,
        retain_graph=True,
    )
    torch.testing.assert_close(moving, predicted)

    group_0 = coefficients("gmc", log_ratio_K) * (trajectory_of(LENGTHS) < 3)
    (detached,) = torch.autograd.grad(-5 * loss_of(log_prob_K, group_0), theta)
    assert not torch.allclose(detached, moving, rtol=0.05)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations_by_hand(aggregation: AggregationKind) -> None:
    """Two trajectories of one and three tokens out of a batch of four trajectories, ten tokens."""
    log_prob_K = double([-1, -2, -3, -4])
    loss = policy_loss(
        log_prob_K,
        double([2, 0.5, 0.5, 0.5]),
        torch.tensor([1, 0, 0, 0]),
        torch.tensor([3, 1]),
        Denominator(trajectories=4, tokens=10),
        aggregation,
    )
    by_hand = {
        "token_sum": (2 + 0.5 * 9) / 4,
        "trajectory_mean": (2 + 0.5 * 3) / 4,
        "token_mean": (2 + 0.5 * 9) / 10,
    }
    assert float(loss.detach()) == pytest.approx(by_hand[aggregation], rel=1e-15)


@pytest.mark.parametrize("method", sorted(ESTIMATORS))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_positions_may_hold_anything(method: str, aggregation: AggregationKind) -> None:
    """R4: ±inf and NaN under the mask; loss and gradient as if the positions were not there."""
    log_prob_K = double(torch.linspace(-3, -0.1, sum(LENGTHS)).tolist()).requires_grad_()
    coefficient_K = coefficients(method, log_prob_K - behaviour_of(log_prob_K))
    clean = loss_of(log_prob_K, coefficient_K, aggregation)
    clean.backward()

    mask_S = torch.ones(3 * sum(LENGTHS), dtype=torch.bool)
    mask_S[torch.arange(0, 3 * sum(LENGTHS), 3)] = False
    mask_S[torch.arange(1, 3 * sum(LENGTHS), 3)] = False
    dirt = double([-INF, NAN, INF, 0.0, NAN]).repeat(len(mask_S))[: len(mask_S)]
    log_prob_S = dirt.clone()
    log_prob_S[mask_S] = log_prob_K.detach()
    log_prob_S.requires_grad_()
    behaviour_S = dirt.flip(0).clone()
    behaviour_S[mask_S] = behaviour_of(log_prob_K)
    selected_K = log_prob_S[mask_S]
    coefficient_K = coefficients(method, selected_K - behaviour_S[mask_S])
    dirty = loss_of(selected_K, coefficient_K, aggregation)
    dirty.backward()

    assert float(dirty.detach()) == float(clean.detach())
    assert log_prob_S.grad is not None
    assert torch.equal(log_prob_S.grad[mask_S], log_prob_K.grad)
    assert bool((log_prob_S.grad[~mask_S] == 0).all())


@pytest.mark.parametrize("method", sorted(ESTIMATORS))
def test_an_advantage_of_zero_contributes_exactly_zero(method: str) -> None:
    """R5: ℓ = 1000, alone in its group; plain IS's weight is inf there."""
    estimator = ESTIMATORS[method]()
    zero = torch.zeros(1, dtype=torch.int64)
    if isinstance(estimator, TrajectoryEstimator):
        coefficient_K = estimator.coefficients(trajectory_ratios([1000.0], advantages=[0.0]))
    else:
        coefficient_K = estimator.coefficients(TokenRatios(double([1000.0]), zero, torch.zeros(1)))
    log_prob_K = torch.tensor([-2.0], requires_grad=True)
    loss = policy_loss(log_prob_K, coefficient_K, zero, zero + 1, Denominator(1, 1), "token_sum")
    loss.backward()
    assert float(loss.detach()) == 0
    assert log_prob_K.grad is not None
    assert log_prob_K.grad.tolist() == [0.0]


@pytest.mark.parametrize("method", TRAJECTORY_METHODS)
def test_an_impossible_group_contributes_exactly_zero(method: str) -> None:
    """R3: every current log-prob −inf; loss 0, gradient 0, no NaN."""
    log_prob_K = torch.tensor([-INF, -INF], requires_grad=True)
    index = torch.arange(2)
    ratios = trajectory_ratios([-INF, -INF], advantages=[1.0, -1.0])
    estimator = ESTIMATORS[method]()
    assert isinstance(estimator, TrajectoryEstimator)
    coefficient_K = estimator.coefficients(ratios)
    loss = policy_loss(
        log_prob_K, coefficient_K, index, ratios.tokens_N, Denominator(2, 2), "token_sum"
    )
    loss.backward()
    assert float(loss.detach()) == 0
    assert log_prob_K.grad is not None
    assert log_prob_K.grad.tolist() == [0.0, 0.0]


def test_a_rejected_trajectory_leaves_the_others_gradient_alone() -> None:
    """R10: the mask rejects one of four; the others have plain IS's gradient, denominator 4."""
    log_prob_K = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    index = torch.arange(4)
    ratios = TrajectoryRatios(
        double([0.1, 3.0, -0.5, 0.0]), index * 0, torch.tensor([1.0, 1.0, -1.0, -1.0]),
        index * 0 + 1, 1,
    )  # fmt: skip
    gradients = {}
    for method in ("tic_mask", "is"):
        coefficient_K = ESTIMATORS[method]().coefficients(ratios)
        loss = policy_loss(
            log_prob_K, coefficient_K, index, ratios.tokens_N, Denominator(4, 4), "token_sum"
        )
        (gradients[method],) = torch.autograd.grad(loss, log_prob_K)
    assert gradients["tic_mask"][1] == 0
    kept = [0, 2, 3]
    assert torch.equal(gradients["tic_mask"][kept], gradients["is"][kept])
    expected = [-math.exp(0.1) / 4, math.exp(-0.5) / 4, 0.25]
    assert gradients["is"][kept].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("method", sorted(ESTIMATORS))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_add_up(method: str, aggregation: AggregationKind) -> None:
    """Falsification 7, S1: global denominators, so the parts' losses and gradients add up."""
    log_prob_K = torch.linspace(-3, -0.1, sum(LENGTHS)).requires_grad_()
    coefficient_K = coefficients(method, log_prob_K.double() - behaviour_of(log_prob_K.double()))
    whole = loss_of(log_prob_K, coefficient_K, aggregation)
    (whole_gradient,) = torch.autograd.grad(whole, log_prob_K, retain_graph=True)
    parts = []
    for members in ([4], [2, 0], [1, 3]):
        chosen_K = torch.isin(trajectory_of(LENGTHS), torch.tensor(members))
        local_K = torch.searchsorted(
            torch.tensor(sorted(members)), trajectory_of(LENGTHS)[chosen_K]
        )
        loss = policy_loss(
            log_prob_K[chosen_K],
            coefficient_K[chosen_K],
            local_K,
            torch.tensor([LENGTHS[i] for i in sorted(members)]),
            Denominator(trajectories=len(LENGTHS), tokens=sum(LENGTHS)),
            aggregation,
        )
        parts.append(loss)
    (gradient,) = torch.autograd.grad(sum(parts), log_prob_K)
    assert torch.equal(gradient, whole_gradient)
    assert float(sum(parts).detach()) == pytest.approx(float(whole.detach()), rel=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("denominator", [Denominator(8, 30), Denominator(0, 0)])
def test_no_token_is_a_zero_with_a_graph(
    aggregation: AggregationKind, denominator: Denominator
) -> None:
    """R7, the estimators' part: a micro-batch, and a whole batch, without one loss token."""
    log_prob_K = torch.zeros(4, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    loss = policy_loss(
        log_prob_K[:0], double([]), nothing, torch.zeros(2).long(), denominator, aggregation
    )
    assert float(loss.detach()) == 0
    loss.backward()
    assert log_prob_K.grad is not None
    assert log_prob_K.grad.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("log_probs", "coefficient", "named"),
    [
        ([-1.0, -1.0, -1.0], [1.0, NAN, 1.0], [1]),
        ([-1.0, -1.0, -1.0], [INF, 0.0, 1.0], [0]),
        ([-1.0, -1.0, -1.0], [1.0, 1.0, 1e200], [2]),
        ([-1.0, -1.0, -1e-5], [1.0, 1.0, 1e42], [2]),
        ([-1.0, NAN, -1.0], [1.0, 0.0, 1.0], [1]),
        ([-1.0, -1.0, -INF], [1.0, 1.0, 0.5], [2]),
        ([0.0, -1.0, -1.0], [INF, 1.0, NAN], [0, 2]),
        ([-INF, -1.0, -1.0], [0.0, 1.0, 1.0], []),
    ],
)
def test_what_is_not_finite_is_seen_and_named(
    log_probs: list[float], coefficient: list[float], named: list[int]
) -> None:
    """A coefficient beyond float32 counts: the gradient would be inf."""
    log_prob_K = torch.tensor(log_probs, requires_grad=True)
    index = torch.arange(3)
    loss = policy_loss(
        log_prob_K, double(coefficient), index, index * 0 + 1, Denominator(3, 3), "token_sum"
    )
    assert math.isfinite(float(loss.detach())) == (not named)
    assert non_finite_trajectories(log_prob_K, double(coefficient), index).tolist() == named


def test_many_tokens_of_one_bad_trajectory_name_it_once() -> None:
    named = non_finite_trajectories(
        torch.zeros(4), double([NAN, 1.0, NAN, INF]), torch.tensor([7, 2, 7, 3])
    )
    assert named.tolist() == [3, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_has_the_log_probs_dtype(dtype: torch.dtype) -> None:
    log_prob_K = torch.full((sum(LENGTHS),), -1.0, dtype=dtype, requires_grad=True)
    loss = loss_of(log_prob_K, torch.ones(sum(LENGTHS), dtype=torch.float64))
    loss.backward()
    assert loss.dtype == dtype
    assert log_prob_K.grad is not None
    assert log_prob_K.grad.dtype == dtype


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_without_lag_every_method_has_the_same_gradient(aggregation: AggregationKind) -> None:
    """Falsification 1, invariant 4: bit for bit."""
    log_prob_K = torch.linspace(-3, -0.1, sum(LENGTHS)).requires_grad_()
    gradients = []
    for method in sorted(ESTIMATORS):
        coefficient_K = coefficients(method, log_prob_K - log_prob_K.detach())
        (gradient,) = torch.autograd.grad(
            loss_of(log_prob_K, coefficient_K, aggregation), log_prob_K
        )
        gradients.append(gradient)
    assert gradients[0].abs().max() > 0
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
