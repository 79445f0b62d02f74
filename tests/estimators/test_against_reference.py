"""Estimators, advantages and loss together against the plain transformers reference."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_gmc.estimators import (
    ESTIMATORS,
    AdvantageKind,
    AggregationKind,
    Denominator,
    TokenRatios,
    TrajectoryEstimator,
    TrajectoryRatios,
    advantages,
    log_mass,
    policy_loss,
    trajectory_means,
    trajectory_sums,
)
from tests.estimators.records import parameters
from tests.reference import ReferenceTrajectory, reference_gradient

TEMPERATURE = 0.7
VOCABULARY = 11


@cache
def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).double()


@cache
def batch() -> tuple[ReferenceTrajectory, ...]:
    """Groups of three, two and two; the last has equal rewards; masks with holes, NaN in them."""
    generator = torch.Generator().manual_seed(3)
    rows: list[ReferenceTrajectory] = []
    for group, reward in ((4, 1.0), (9, 0.0), (4, 0.5), (9, 1.0), (4, 0.0), (2, 1.0), (2, 1.0)):
        prompt, response = torch.randint(1, 6, (2,), generator=generator).tolist()
        tokens = torch.randint(VOCABULARY, (prompt + response,), generator=generator).tolist()
        mask = [t != 2 for t in range(response)]
        behaviour = (-2.4 + 0.5 * torch.randn(response, generator=generator)).tolist()
        rows.append(
            {
                "tokens": tokens,
                "prompt_length": prompt,
                "mask": mask,
                "behaviour_log_prob": [
                    b if m else float("nan") for b, m in zip(behaviour, mask, strict=True)
                ],
                "group": group,
                "reward": reward,
            }
        )
    return tuple(rows)


def selected(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs with graph, log-ratios, trajectory index of the loss tokens, by tensor indexing."""
    log_probs, log_ratios, index = [], [], []
    for i, row in enumerate(batch()):
        tokens, start = torch.tensor(row["tokens"]), row["prompt_length"]
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        log_prob_T = (logits / TEMPERATURE).log_softmax(-1)[start - 1 : -1]
        log_prob_T = log_prob_T.gather(1, tokens[start:, None])[:, 0]
        mask_T = torch.tensor(row["mask"])
        behaviour_T = torch.tensor(row["behaviour_log_prob"], dtype=torch.float64)
        log_probs.append(log_prob_T[mask_T])
        log_ratios.append(log_prob_T.detach()[mask_T] - behaviour_T[mask_T])
        index.append(torch.full((int(mask_T.sum()),), i))
    return torch.cat(log_probs), torch.cat(log_ratios), torch.cat(index)


@pytest.mark.parametrize("method", sorted(ESTIMATORS))
@pytest.mark.parametrize(
    ("kind", "aggregation"),
    [
        ("leave_one_out", "token_sum"),
        ("group_mean", "trajectory_mean"),
        ("group_mean_std", "token_mean"),
        ("whitened", "token_mean"),
        ("none", "token_sum"),
    ],
)
def test_one_step(method: str, kind: AdvantageKind, aggregation: AggregationKind) -> None:
    """Loss, gradient, masses and weights; T3: the first response token comes from position p−1."""
    model = tiny_model()
    model.zero_grad(set_to_none=True)
    log_prob_K, log_ratio_K, trajectory_K = selected(model)
    n = len(batch())
    dense = {4: 0, 9: 1, 2: 2}
    group_N = torch.tensor([dense[row["group"]] for row in batch()])
    advantage_N = advantages(torch.tensor([row["reward"] for row in batch()]), group_N, 3, kind)
    tokens_N = torch.bincount(trajectory_K, minlength=n)
    estimator = ESTIMATORS[method]()
    log_ratio_N = trajectory_sums(log_ratio_K, trajectory_K, n)
    if isinstance(estimator, TrajectoryEstimator):
        behaviour_N = trajectory_sums(log_prob_K.detach() - log_ratio_K, trajectory_K, n)
        ratios = TrajectoryRatios(
            log_ratio_N, group_N, advantage_N, tokens_N, 3, behaviour_log_prob_N=behaviour_N
        )
        coefficient_K = estimator.coefficients(ratios)[trajectory_K]
        weight_N = estimator.weights(ratios)
    else:
        token_ratios = TokenRatios(log_ratio_K, trajectory_K, advantage_N)
        coefficient_K = estimator.coefficients(token_ratios)
        weight_N = trajectory_means(estimator.weights(token_ratios), trajectory_K, n)
    loss = policy_loss(
        log_prob_K, coefficient_K, trajectory_K, tokens_N, Denominator(n, len(log_prob_K)),
        aggregation,
    )  # fmt: skip
    loss.backward()

    reference = reference_gradient(
        model, batch(), method, parameters(estimator), kind, aggregation, TEMPERATURE
    )
    assert float(loss.detach()) == pytest.approx(reference.loss, rel=1e-6)
    assert weight_N.tolist() == pytest.approx(reference.weights, rel=1e-6)
    log_mass_P = log_mass(log_ratio_N, group_N, 3)
    assert log_mass_P.exp().tolist() == pytest.approx(
        [reference.mass[group] for group in dense], rel=1e-6
    )
    # The batch exercises the cap on one side and the other.
    assert max(reference.mass.values()) > 1.2 > min(reference.mass.values())
    gradient = {name: p.grad for name, p in model.named_parameters()}
    assert gradient.keys() == reference.gradient.keys()
    largest = max(float(g.abs().max()) for g in reference.gradient.values())
    for name, expected in reference.gradient.items():
        torch.testing.assert_close(gradient[name], expected, rtol=1e-5, atol=1e-6 * largest)
