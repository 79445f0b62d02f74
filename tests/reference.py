"""What one policy step must be: plain transformers, one trajectory at a time, loops over groups.

An oracle for the learner, written from the method's formulas alone; it imports nothing of the
package under test. The model is copied to float64 on the CPU. (transformers' RMSNorm and rotary
tables go through float32 whatever the model's dtype, so read its results as good to about 1e-6.)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, localcontext
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn


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
    """Of each trajectory; with grpo the mean over its loss tokens."""
    log_ratios: list[float]
    advantages: list[float]


def reference_gradient(
    hf_model: nn.Module,
    trajectories: Sequence[ReferenceTrajectory],
    estimator: str,
    params: Mapping[str, float],
    advantage: str,
    aggregation: str,
    temperature: float,
) -> Reference:
    """Loss, gradient, masses and weights of one batch of whole groups.

    estimator: gmc, none, is, tic_clip, tic_mask (params: epsilon) or grpo (clip_low, clip_high).
    The loss is −Σ_i w_i A_i Σ_t log π over the denominator, with w held fixed; grpo's gradient
    comes from differentiating min(rA, clip(r)A) itself.
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
    loss = 0.0
    weights = []
    for i, trajectory in enumerate(trajectories):
        tokens = len(token_log_ratios[i])
        scale = advantages[i] / (total_tokens if aggregation == "token_mean" else len(trajectories))
        if aggregation == "trajectory_mean" and tokens:
            scale /= tokens
        if estimator == "grpo":
            token_weights = [_grpo_weight(r, advantages[i], params) for r in token_log_ratios[i]]
            weights.append(math.fsum(token_weights) / tokens if tokens else 1.0)
        else:
            cap = 1 + params.get("epsilon", math.inf)
            weights.append(_WEIGHTS[estimator](log_ratios[i], mass[trajectory["group"]], cap))
            token_weights = [weights[i]] * tokens
        if scale == 0 or tokens == 0:
            continue
        pairs = _loss_tokens(model, trajectory, temperature)
        terms = [-scale * w * p for w, (p, _) in zip(token_weights, pairs, strict=True)]
        loss += math.fsum(float(term.detach()) for term in terms)
        if estimator == "grpo":
            terms = [-_grpo_surrogate((p - b).exp(), scale, params) for p, b in pairs]
        torch.stack(terms).sum().backward()
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
            _exp(log_ratio)
            for log_ratio, t in zip(log_ratios, trajectories, strict=True)
            if t["group"] == group
        ]
        mass[group] = sum(ratios, Decimal(0)) / len(ratios)
    return mass


def _exp(value: float) -> Decimal:
    with localcontext(prec=50):
        return Decimal(value).exp()


def _gmc_weight(log_ratio: float, mass: Decimal, cap: float) -> float:
    if mass == 0:
        return 0.0
    with localcontext(prec=50):
        return float(_exp(log_ratio) * min(Decimal(1), Decimal(cap) / mass))


_WEIGHTS: dict[str, Callable[[float, Decimal, float], float]] = {
    "gmc": _gmc_weight,
    "none": lambda log_ratio, mass, cap: 1.0,
    "is": lambda log_ratio, mass, cap: math.exp(log_ratio),
    "tic_clip": lambda log_ratio, mass, cap: min(math.exp(min(log_ratio, 700.0)), cap),
    "tic_mask": lambda log_ratio, mass, cap: (
        math.exp(log_ratio) if log_ratio <= math.log(cap) else 0.0
    ),
}


def _grpo_weight(log_ratio: float, advantage: float, params: Mapping[str, float]) -> float:
    ratio = math.exp(log_ratio)
    if advantage > 0 and ratio > 1 + params["clip_high"]:
        return 0.0
    if advantage < 0 and ratio < 1 - params["clip_low"]:
        return 0.0
    return ratio


def _grpo_surrogate(ratio: Tensor, advantage: float, params: Mapping[str, float]) -> Tensor:
    clipped = ratio.clamp(1 - params["clip_low"], 1 + params["clip_high"])
    return torch.minimum(ratio * advantage, clipped * advantage)


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
        spread = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
        result.append((own - mean) / (spread + 1e-6 if kind == "group_mean_std" else 1.0))
    return result
