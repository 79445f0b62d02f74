"""The delayed environment: exact values, an unbiased gradient, a lag that is kept."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_gmc.estimators import GMC, GRPO, NoCorrection, PlainIS, TICClip, TICMask
from megatron_gmc.theory.delays import Training, make_environment, train
from megatron_gmc.theory.groups import token_coefficients

SMALL = make_environment(prompts=2, vocabulary=3, length=3, width=5, seed=3)


def exact_gradient(theta: torch.Tensor) -> torch.Tensor:
    leaf = theta.clone().requires_grad_()
    value = SMALL.value(SMALL.log_tables(leaf[None]))[0]
    (gradient,) = torch.autograd.grad(value, leaf)
    return gradient


def test_probabilities_sum_to_one_and_the_value_is_their_mean_reward() -> None:
    theta = torch.linspace(-1, 1, 5, dtype=torch.float64)[None]
    table = SMALL.log_tables(theta)
    chance = SMALL.sequence_log_probs(table).exp()
    assert torch.allclose(chance.sum(-1), torch.ones(1, 2, dtype=torch.float64))
    expected = sum(
        float(chance[0, x, i] * SMALL.reward_XL[x, i]) / 2 for x in range(2) for i in range(27)
    )
    assert float(SMALL.value(table)) == pytest.approx(expected, rel=1e-12)


def test_one_step_moves_along_the_gradient_on_average() -> None:
    """The first step's mean over many seeds is η∇J."""
    training = Training(lag=0, step_size=1.0, steps=1, group_size=4, seeds=20_000)
    moved = train(SMALL, PlainIS(), training).theta
    error = moved.std(0) / math.sqrt(len(moved))
    expected = exact_gradient(torch.zeros(5, dtype=torch.float64))
    assert expected.norm() > 10 * error.norm()
    assert bool(((moved.mean(0) - expected).abs() < 5 * error).all())


def test_plain_ratios_correct_a_lag_and_no_correction_does_not() -> None:
    """After one large step, the second step's mean over seeds at lag 1, from one common θ."""
    start = Training(lag=1, step_size=4.0, steps=1, group_size=4, seeds=1)
    theta = train(SMALL, PlainIS(), start).theta[0]
    table, old = SMALL.log_tables(theta[None]), SMALL.log_tables(torch.zeros(1, 5).double())
    log_policy, log_old = (SMALL.sequence_log_probs(t)[0] for t in (table, old))
    # Every sequence once, weighted by its probability under the old policy: no sampling.
    score = torch.autograd.functional.jacobian(
        lambda x: SMALL.sequence_log_probs(SMALL.log_tables(x[None]))[0], theta
    )
    old_mass = (log_old.exp() * SMALL.reward_XL)[..., None] * score / 2
    ratio = (log_policy - log_old).exp()[..., None]
    assert torch.allclose((old_mass * ratio).sum((0, 1)), exact_gradient(theta), atol=1e-12)
    assert not torch.allclose(old_mass.sum((0, 1)), exact_gradient(theta), atol=1e-3)


@pytest.mark.parametrize("method", [PlainIS(), TICClip(), TICMask(), NoCorrection(), GRPO()])
def test_without_lag_every_method_takes_the_same_steps(
    method: PlainIS | TICClip | TICMask | NoCorrection | GRPO,
) -> None:
    """E11."""
    training = Training(lag=0, step_size=2.0, steps=10, seeds=2)
    theta = train(SMALL, method, training).theta
    assert torch.equal(theta, train(SMALL, GMC(), training).theta)
    assert theta.abs().min() > 0


def test_the_weight_is_one_without_lag_and_at_most_the_cap_under_a_lag() -> None:
    def weight(lag: int) -> torch.Tensor:
        training = Training(lag=lag, step_size=20.0, steps=8, seeds=4)
        found = train(SMALL, TICClip(), training).weight
        return found[found.isfinite()]

    assert torch.allclose(weight(0), torch.ones(()).double(), atol=1e-6)
    assert float(weight(4).max()) <= 1.2 + 1e-6
    assert float(weight(4).min()) < 0.9


def test_a_lag_parts_the_methods_only_after_the_first_step() -> None:
    """Step 0 has version 0 on both sides; step 1 at lag 1 has ratios that are not 1."""
    for steps, same in ((1, True), (2, False)):
        training = Training(lag=1, step_size=8.0, steps=steps, seeds=4)
        plain, none = (train(SMALL, m, training).theta for m in (PlainIS(), NoCorrection()))
        assert torch.equal(plain, none) is same


def test_lags_beyond_the_run_sample_from_the_first_version() -> None:
    courses = [
        train(SMALL, NoCorrection(), Training(lag=lag, step_size=1.0, steps=6, seeds=3)).theta
        for lag in (5, 50)
    ]
    assert torch.equal(*courses)
    shorter = train(SMALL, NoCorrection(), Training(lag=4, step_size=1.0, steps=6, seeds=3)).theta
    assert not torch.equal(courses[0], shorter)


def test_adam_moves_by_the_step_size_at_first() -> None:
    training = Training(lag=0, step_size=0.05, steps=1, seeds=8, optimizer="adam")
    moved = train(SMALL, GMC(), training).theta.abs()
    moved = moved[moved > 0]
    assert len(moved) > 0
    assert torch.allclose(moved, torch.full_like(moved, 0.05), rtol=1e-4)


def test_token_and_trajectory_methods_share_one_form() -> None:
    log_ratio = torch.tensor([[0.1, 0.2], [0.5, 0.5], [0.0, 0.0], [-1.0, 0.3]]).double()
    reward, group = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    whole = token_coefficients(TICClip(), log_ratio, reward, group, 2)
    capped = [[1.2] * 2, [-1.2] * 2, [1.0] * 2, [-math.exp(-0.7)] * 2]
    assert torch.allclose(whole, torch.tensor(capped).double())
    tokens = token_coefficients(GRPO(), log_ratio, reward, group, 2)
    expected = [[math.exp(0.1), 0.0], [-math.exp(0.5)] * 2, [1.0, 1.0], [0.0, -math.exp(0.3)]]
    assert torch.allclose(tokens, torch.tensor(expected).double(), atol=1e-6)
