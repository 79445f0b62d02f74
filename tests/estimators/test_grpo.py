"""GRPO's token weights against autograd of its clipped surrogate."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_gmc.estimators import ESTIMATORS, GRPO, TokenEstimator
from tests.estimators.records import TOKEN_METHODS, double, token_ratios


def surrogate_weights(log_ratios: list[float], advantage: float, low: float, high: float):
    """d/d(log π) of min(rA, clip(r)A), over A: what multiplies A·∇ log π."""
    log_ratio_K = double(log_ratios).requires_grad_()
    ratio_K = log_ratio_K.exp()
    clipped_K = ratio_K.clamp(1 - low, 1 + high)
    torch.minimum(ratio_K * advantage, clipped_K * advantage).sum().backward()
    return (log_ratio_K.grad / advantage).tolist()


@settings(deadline=None, max_examples=200)
@given(
    log_ratios=st.lists(st.floats(-3, 3) | st.floats(-0.3, 0.3), min_size=1, max_size=8),
    advantage=st.sampled_from([-2.0, -0.1, 0.1, 3.0]),
    low=st.floats(0.01, 0.9),
    high=st.floats(0.01, 3),
)
def test_against_autograd_of_the_surrogate(
    log_ratios: list[float], advantage: float, low: float, high: float
) -> None:
    assume(all(abs(math.exp(r) - edge) > 1e-9 for r in log_ratios for edge in (1 - low, 1 + high)))
    ratios = token_ratios(log_ratios, [0] * len(log_ratios), [advantage])
    weights = GRPO(clip_low=low, clip_high=high).weights(ratios).tolist()
    assert weights == pytest.approx(surrogate_weights(log_ratios, advantage, low, high), rel=1e-12)


def test_the_clip_has_a_side_for_each_sign() -> None:
    """Only the step that moves further away is stopped."""
    log_ratios = [math.log(r) for r in (0.5, 1.5, 0.5, 1.5)]
    ratios = token_ratios(log_ratios, [0, 0, 1, 1], [1.0, -1.0])
    assert GRPO().weights(ratios).tolist() == pytest.approx([0.5, 0.0, 0.0, 1.5])


def test_the_clips_are_independent() -> None:
    ratios = token_ratios([math.log(1.25)] * 2, [0, 0], [1.0])
    assert GRPO(clip_high=0.28).weights(ratios).tolist() == pytest.approx([1.25, 1.25])
    assert GRPO(clip_low=0.28).weights(ratios).tolist() == [0, 0]


@pytest.mark.parametrize("method", TOKEN_METHODS)
def test_what_every_token_method_owes(method: str) -> None:
    """Lag 0 gives 1 (falsification 1); −inf gives 0; NaN stays NaN; no gradient."""
    estimator = ESTIMATORS[method]()
    assert isinstance(estimator, TokenEstimator)
    values = [0.0, 0.0, -math.inf, -math.inf, math.nan]
    ratios = token_ratios(double(values).requires_grad_(), [0, 1, 0, 1, 2], [1.0, -1.0, 0.0])
    weight_K = estimator.weights(ratios)
    assert not weight_K.requires_grad
    assert weight_K[:4].tolist() == [1, 1, 0, 0]
    assert math.isnan(float(weight_K[4]))


@pytest.mark.parametrize("method", TOKEN_METHODS)
def test_coefficients_take_the_trajectory_s_advantage(method: str) -> None:
    """R5: exactly 0 where the advantage is."""
    ratios = token_ratios([0.0, 1000.0, 0.0], [1, 0, 2], [0.0, -3.0, 0.5])
    assert ESTIMATORS[method]().coefficients(ratios).tolist() == [-3.0, 0.0, 0.5]
