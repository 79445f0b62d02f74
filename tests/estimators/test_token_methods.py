"""Token methods besides GRPO's clip: oracle, surrogates under autograd, the batch's budget."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_gmc.estimators import (
    CISPO,
    ESTIMATORS,
    GRPO,
    M2PO,
    DecoupledPPO,
    IcePop,
    TISToken,
    TokenEstimator,
    TokenRatios,
)
from tests.estimators import oracle
from tests.estimators.records import TOKEN_METHODS, double, parameters, token_ratios

log_ratio_lists = st.lists(st.floats(-5, 5) | st.floats(-0.5, 0.5), min_size=1, max_size=10)
EDGES = [0.5, 0.8, 1.2, 2.0, 3.0, 5.0]


def away_from(log_ratios: list[float], edges: list[float]) -> bool:
    return all(abs(r - math.log(edge)) > 1e-9 for r in log_ratios for edge in edges)


@pytest.mark.parametrize("method", TOKEN_METHODS)
@settings(deadline=None, max_examples=100)
@given(log_ratios=log_ratio_lists, seed=st.integers(0, 1000))
def test_against_the_oracle(method: str, log_ratios: list[float], seed: int) -> None:
    assume(away_from(log_ratios, EDGES))
    # Sums of squares at the very edge of the budget depend on their order.
    assume(len({round(abs(r), 9) for r in log_ratios}) == len(log_ratios))
    generator = torch.Generator().manual_seed(seed)
    trajectories = torch.randint(3, (len(log_ratios),), generator=generator).tolist()
    advantages = [1.5, -0.5, 0.0]
    estimator = ESTIMATORS[method]()
    assert isinstance(estimator, TokenEstimator)
    weights = estimator.weights(token_ratios(log_ratios, trajectories, advantages)).tolist()
    expected = oracle.token_weights(
        method, parameters(estimator), log_ratios, [advantages[i] for i in trajectories]
    )
    assert weights == pytest.approx(expected, rel=1e-12)


def gradient_of(objective: Tensor, log_prob_K: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(objective, log_prob_K)
    return gradient


@pytest.mark.parametrize("estimator", [TISToken(), IcePop(), DecoupledPPO()])
@settings(deadline=None, max_examples=100)
@given(
    pairs=st.lists(st.tuples(st.floats(-2, 2), st.floats(-1, 1)), min_size=1, max_size=8),
    advantage=st.sampled_from([-2.0, 0.5]),
)
def test_proximal_methods_are_the_gradient_of_their_surrogate(
    estimator: TISToken | IcePop | DecoupledPPO, pairs: list[tuple[float, float]], advantage: float
) -> None:
    """f(k) · min(uA, clip(u)A), k = proximal/behaviour fixed and u = current/proximal moving."""
    staleness, update = ([pair[i] for pair in pairs] for i in (0, 1))
    assume(away_from(staleness, EDGES) and away_from(update, EDGES))
    update_K = double(update).requires_grad_()
    k_K, u_K = double(staleness).exp(), update_K.exp()
    if isinstance(estimator, TISToken):
        factor_K = k_K.clamp(max=2.0)
    elif isinstance(estimator, IcePop):
        factor_K = k_K * ((k_K >= 0.5) & (k_K <= 5.0))
    else:
        factor_K = k_K
    surrogate_K = factor_K * torch.minimum(u_K * advantage, u_K.clamp(0.8, 1.2) * advantage)
    total = [k + u for k, u in pairs]
    ratios = token_ratios(total, [0] * len(pairs), [advantage], proximal=staleness)
    torch.testing.assert_close(
        estimator.coefficients(ratios),
        gradient_of(surrogate_K.sum(), update_K),
        rtol=1e-9,
        atol=1e-13,
    )


@pytest.mark.parametrize("method", ["tis_token", "icepop", "decoupled_ppo"])
def test_without_a_proximal_policy_it_is_the_current_one(method: str) -> None:
    log_ratios = [0.9, -0.3, 2.0, -1.5]
    estimator = ESTIMATORS[method]()
    assert isinstance(estimator, TokenEstimator)
    absent = estimator.weights(token_ratios(log_ratios, [0] * 4, [1.0]))
    same = estimator.weights(token_ratios(log_ratios, [0] * 4, [1.0], proximal=log_ratios))
    assert torch.equal(absent, same)


def test_an_update_step_is_clipped_apart_from_the_staleness() -> None:
    """The clip sees u alone: k = u = 1.5 is clipped; k = 3, u = 1 is not, though r is larger."""
    ratios = token_ratios(
        [math.log(2.25), math.log(3.0)], [0, 0], [1.0], proximal=[math.log(1.5), math.log(3.0)]
    )
    assert DecoupledPPO().weights(ratios).tolist() == pytest.approx([0.0, 3.0])
    assert TISToken().weights(ratios).tolist() == pytest.approx([0.0, 2.0])


def test_cispo_keeps_every_tokens_gradient() -> None:
    """Detached weights on log π: by autograd, with the surrogate's own stop-gradient."""
    log_ratios = [math.log(r) for r in (0.01, 0.5, 1.0, 4.9, 5.1, 300.0)]
    log_ratio_K = double(log_ratios).requires_grad_()
    surrogate = (log_ratio_K.exp().clamp(max=5.0).detach() * -2.0 * log_ratio_K).sum()
    found = CISPO().coefficients(token_ratios(log_ratios, [0] * 6, [-2.0]))
    torch.testing.assert_close(found, gradient_of(surrogate, log_ratio_K))
    raised = CISPO(weight_max=2.0, weight_min=0.4).weights(token_ratios(log_ratios, [0] * 6, [1.0]))
    assert raised.tolist() == pytest.approx([0.4, 0.5, 1.0, 2.0, 2.0, 2.0])


@settings(deadline=None, max_examples=100)
@given(log_ratios=log_ratio_lists, advantage=st.sampled_from([-1.5, 0.5]))
def test_dual_clip_is_the_gradient_of_its_surrogate(
    log_ratios: list[float], advantage: float
) -> None:
    """max(min(rA, clip(r)A), 3A) for A < 0, the clipped surrogate alone for A > 0."""
    assume(away_from(log_ratios, EDGES))
    log_ratio_K = double(log_ratios).requires_grad_()
    ratio_K = log_ratio_K.exp()
    surrogate_K = torch.minimum(ratio_K * advantage, ratio_K.clamp(0.8, 1.2) * advantage)
    if advantage < 0:
        surrogate_K = surrogate_K.clamp(min=3 * advantage)
    ratios = token_ratios(log_ratios, [0] * len(log_ratios), [advantage])
    torch.testing.assert_close(
        GRPO(dual_clip=3.0).coefficients(ratios),
        gradient_of(surrogate_K.sum(), log_ratio_K),
        rtol=1e-12,
        atol=0,
    )


def test_m2po_leaves_out_the_largest_harmful_tokens() -> None:
    """Squares 0.01, 0.04, 0.09, 0.25: the mean of three is 0.0467, of two 0.025."""
    log_ratios = [0.1, 0.2, 0.3, 0.5, -0.9, 0.8]
    ratios = token_ratios(log_ratios, [0, 0, 0, 0, 0, 1], [1.0, -1.0])
    weights = M2PO().weights(ratios).tolist()
    assert weights == pytest.approx(
        [math.exp(0.1), math.exp(0.2), 0.0, 0.0, math.exp(-0.9), math.exp(0.8)]
    )
    # One more harmless or small token elsewhere in the batch moves the budget.
    wider = token_ratios([*log_ratios, -0.01], [0, 0, 0, 0, 0, 1, 1], [1.0, -1.0])
    assert M2PO().weights(wider).tolist()[2] == pytest.approx(math.exp(0.3))


@settings(deadline=None, max_examples=100)
@given(log_ratios=log_ratio_lists, seed=st.integers(0, 1000))
def test_m2pos_budget_holds_in_any_order(log_ratios: list[float], seed: int) -> None:
    """What stays of the harmful tokens has a mean square within the budget; order is nothing."""
    doubled = log_ratios + log_ratios
    ratios = token_ratios(doubled, [0] * len(doubled), [1.0])
    weight_K = M2PO().weights(ratios)
    kept = [r for r, w in zip(doubled, weight_K.tolist(), strict=True) if r > 0 and w > 0]
    assert not kept or sum(r * r for r in kept) / len(kept) <= 0.04 * (1 + 1e-9)
    order = torch.randperm(len(doubled), generator=torch.Generator().manual_seed(seed))
    shuffled = token_ratios(double(doubled)[order], [0] * len(doubled), [1.0])
    assert torch.equal(M2PO().weights(shuffled), weight_K[order])


def test_a_batch_without_a_harmful_token() -> None:
    ratios = token_ratios([0.0, -3.0, 3.0], [0, 0, 1], [1.0, -1.0])
    assert M2PO().weights(ratios).tolist() == pytest.approx([1, math.exp(-3), math.exp(3)])
    nothing = torch.zeros(0, dtype=torch.int64)
    assert M2PO().weights(TokenRatios(double([]), nothing, double([1.0]))).tolist() == []
