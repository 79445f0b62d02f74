"""What one policy step must be: plain transformers, one trajectory at a time, loops over groups.

An oracle for the learner, written from the method's formulas alone; it imports nothing of the
package under test. The model is copied to float64 on the CPU. (transformers' RMSNorm and rotary
tables go through float32 whatever the model's dtype, so read its results as good to about 1e-6.)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from tests.estimators.oracle import (
    TOKEN_METHODS,
    Member,
    Params,
    decimal_exp,
    method_weights,
    trajectory_weights,
)


class ReferenceTrajectory(TypedDict):
    tokens: list[int]
    """Prompt and response."""
    prompt_length: int
    mask: list[bool]
    """Over response tokens: which are trained on."""
    behaviour_log_prob: list[float]
    """Over response tokens; anything at all, NaN too, where the mask is False."""
    group: int
    reward: float


class Reference(NamedTuple):
    """Everything about one step; `gradient` has the model's parameter names, tied ones once."""

    loss: float
    gradient: dict[str, Tensor]
    mass: dict[int, float]
    """Group → M."""
    weights: list[float]
    """Of each trajectory; with a token method the mean over its loss tokens."""
    log_ratios: list[float]
    advantages: list[float]


def reference_gradient(
    hf_model: nn.Module,
    trajectories: Sequence[ReferenceTrajectory],
    estimator: str,
    params: Params,
    advantage: str,
    aggregation: str,
    temperature: float,
) -> Reference:
    """Loss, gradient, masses and weights of one batch of whole groups.

    estimator, params: the method's name and all of its parameters. The loss is −Σ_i w_i A_i Σ_t
    log π over the denominator, with w held fixed (and A_i − Ā for A_i in the capped groups of
    gmc_differentiable); grpo's gradient comes from differentiating min(rA, clip(r)A) itself.
    """
    model = copy.deepcopy(hf_model).double().cpu().eval()
    model.zero_grad(set_to_none=True)
    advantages = _advantages(trajectories, advantage)
    with torch.no_grad():
        token_log_ratios = [
            [float(p) - b for p, b in _loss_tokens(model, t, temperature)] for t in trajectories
        ]
    log_ratios = [math.fsum(ratios) for ratios in token_log_ratios]
    mass = _masses(trajectories, log_ratios)
    total_tokens = sum(len(ratios) for ratios in token_log_ratios)
    behaviour = [
        math.fsum(b for b, used in zip(t["behaviour_log_prob"], t["mask"], strict=True) if used)
        for t in trajectories
    ]
    members = [
        Member(log_ratio, len(ratios), advantage_, behaviour_)
        for log_ratio, ratios, advantage_, behaviour_ in zip(
            log_ratios, token_log_ratios, advantages, behaviour, strict=True
        )
    ]
    groups = [trajectory["group"] for trajectory in trajectories]
    token_weights = method_weights(estimator, params, members, groups, token_log_ratios)
    baselines = _baselines(estimator, params, members, groups)
    loss = 0.0
    for i, trajectory in enumerate(trajectories):
        tokens = len(token_log_ratios[i])
        denominator = total_tokens if aggregation == "token_mean" else len(trajectories)
        if aggregation == "trajectory_mean" and tokens:
            denominator *= tokens
        scale = (advantages[i] - baselines[i]) / denominator
        if scale == 0 or tokens == 0:
            continue
        pairs = _loss_tokens(model, trajectory, temperature)
        terms = [-scale * w * p for w, (p, _) in zip(token_weights[i], pairs, strict=True)]
        loss += math.fsum(float(term.detach()) for term in terms)
        if estimator == "grpo":
            terms = [-_grpo_surrogate((p - b).exp(), scale, params) for p, b in pairs]
        torch.stack(terms).sum().backward()
    weights = [
        math.fsum(of_tokens) / len(of_tokens)
        if of_tokens
        else _without_tokens(estimator, params, members, groups, i)
        for i, of_tokens in enumerate(token_weights)
    ]
    gradient = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    mass_of = {group: float(value) for group, value in mass.items()}
    return Reference(loss, gradient, mass_of, weights, log_ratios, advantages)


def _loss_tokens(
    model: nn.Module, trajectory: ReferenceTrajectory, temperature: float
) -> list[tuple[Tensor, float]]:
    """(current log-prob with graph, behaviour log-prob) of each response token with mask True."""
    tokens = trajectory["tokens"]
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    pairs = []
    first = trajectory["prompt_length"]
    for t, wanted in enumerate(trajectory["mask"]):
        if wanted:
            # The token at a position is predicted by the position before it.
            log_probs = torch.log_softmax(logits[first + t - 1] / temperature, dim=-1)
            pairs.append((log_probs[tokens[first + t]], trajectory["behaviour_log_prob"][t]))
    return pairs


def _masses(
    trajectories: Sequence[ReferenceTrajectory], log_ratios: Sequence[float]
) -> dict[int, Decimal]:
    mass = {}
    for group in {t["group"] for t in trajectories}:
        ratios = [
            decimal_exp(log_ratio)
            for log_ratio, t in zip(log_ratios, trajectories, strict=True)
            if t["group"] == group
        ]
        mass[group] = sum(ratios, Decimal(0)) / len(ratios)
    return mass


def _grpo_surrogate(ratio: Tensor, advantage: float, params: Params) -> Tensor:
    clipped = ratio.clamp(1 - params["clip_low"], 1 + params["clip_high"])
    return torch.minimum(ratio * advantage, clipped * advantage)


def _baselines(
    estimator: str, params: Params, members: Sequence[Member], groups: Sequence[int]
) -> list[float]:
    """What gmc_differentiable takes off the advantages of a capped group; 0 otherwise."""
    result = [0.0] * len(members)
    if estimator != "gmc_differentiable":
        return result
    for group in set(groups):
        indexes = [i for i, g in enumerate(groups) if g == group]
        ratios = [decimal_exp(members[i].log_ratio) for i in indexes]
        if sum(ratios) / len(ratios) > 1 + Decimal(params["epsilon"]):
            products = [
                r * Decimal(members[i].advantage) for r, i in zip(ratios, indexes, strict=True)
            ]
            for i in indexes:
                result[i] = float(sum(products) / sum(ratios))
    return result


def _without_tokens(
    estimator: str, params: Params, members: Sequence[Member], groups: Sequence[int], index: int
) -> float:
    """The weight of a trajectory that has no loss token: a token method has none to average."""
    if estimator in TOKEN_METHODS:
        return 1.0
    return trajectory_weights(estimator, params, members, groups)[index]


def _advantages(trajectories: Sequence[ReferenceTrajectory], kind: str) -> list[float]:
    result = []
    for i, trajectory in enumerate(trajectories):
        rewards = [
            t["reward"]
            for j, t in enumerate(trajectories)
            if t["group"] == trajectory["group"] and j != i
        ]
        own = trajectory["reward"]
        if kind == "none":
            result.append(own)
            continue
        if all(reward == own for reward in rewards):
            result.append(0.0)
            continue
        if kind == "leave_one_out":
            result.append(own - math.fsum(rewards) / len(rewards))
            continue
        rewards.append(own)
        mean = math.fsum(rewards) / len(rewards)
        if kind == "whitened":
            result.append((own - mean) / _spread_of_batch(trajectories))
            continue
        spread = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
        result.append((own - mean) / (spread + 1e-6 if kind == "group_mean_std" else 1.0))
    return result


def _spread_of_batch(trajectories: Sequence[ReferenceTrajectory]) -> float:
    deviations = _advantages(trajectories, "group_mean")
    return math.sqrt(math.fsum(d**2 for d in deviations) / len(deviations)) + 1e-6
