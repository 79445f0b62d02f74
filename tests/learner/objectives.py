"""Terms and factors beside the plain policy gradient: the learner's gradient and a float64 oracle.

The oracle is autograd through the whole surrogate, on transformers, one trajectory at a time.
test_objectives.py compares.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatron_gmc.config import LearnerConfig, ObjectiveConfig
from megatron_gmc.convert.hf_config import load_shape
from megatron_gmc.convert.hugging_face import stream_tensors
from megatron_gmc.estimators import ESTIMATORS as REGISTRY
from megatron_gmc.learner.batch import Batch, Row
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model_weights import gathered, load_weights, parameter_name
from megatron_gmc.learner.policy_step import Objective, policy_gradient, score_proximal
from megatron_gmc.learner.reference import ReferencePolicy
from megatron_gmc.optim_config import OptimConfig
from tests.estimators import oracle
from tests.learner.gradients import TEMPERATURE, mesh_config, trajectories
from tests.models import tiny_model
from tests.reference import ReferenceTrajectory

KL, ENTROPY = 0.1, 0.3
ALL, ONE = 4096, 32
"""Tokens of a micro-batch that holds the whole batch, and of one that holds a trajectory."""


@dataclass(frozen=True)
class Case:
    """An objective, and whether steps have been taken since the proximal policy."""

    estimator: str
    params: dict[str, float] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    proximal: bool = False
    equal_rewards: bool = False

    @property
    def is_ppo(self) -> bool:
        """Whether the gradient is that of f(k) · min(uA, clip(u)A)."""
        return "clip_low" in self.params


_KL = {"kl": {"coefficient": KL}}
_ENTROPY = {"entropy_coefficient": ENTROPY}
_PPO = {"clip_low": 0.2, "clip_high": 0.2}
_TRUNCATE = {"mismatch": {"name": "truncate", "cap": 1.2}}
_MASK = {"mismatch": {"name": "mask", "lower": 0.7, "upper": 1.5}}
_GMC = {"epsilon": 0.2}
CASES = {
    "kl": Case("gmc", _GMC, _KL),
    "kl alone": Case("gmc", _GMC, _KL, equal_rewards=True),
    "entropy": Case("gmc", _GMC, _ENTROPY | {"aggregation": "token_mean"}),
    "kl and entropy": Case("tic_clip", _GMC, _KL | _ENTROPY | {"aggregation": "trajectory_mean"}),
    "kl of tokens": Case("cispo", {"weight_max": 1.2}, _KL | _ENTROPY),
    "truncate": Case("gmc", _GMC, _TRUNCATE, proximal=True),
    "truncate at once": Case("gmc", _GMC, _TRUNCATE),
    "mask": Case("tic_mask", _GMC, _MASK | _KL, proximal=True),
    "decoupled": Case("decoupled_ppo", _PPO, proximal=True),
    "tis": Case("tis_token", _PPO | {"cap": 1.2}, proximal=True),
    "icepop": Case("icepop", _PPO | {"lower": 0.7, "upper": 1.5}, proximal=True),
}


def models() -> dict[str, PreTrainedModel]:
    """The policy, another one as a reference, and one near it that it was some steps ago."""
    policy = tiny_model("qwen3", tied=True, layers=4)
    before = copy.deepcopy(policy)
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in before.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    return {
        "policy": policy,
        "reference": tiny_model("qwen3", tied=True, seed=5, layers=4),
        "proximal": before,
    }


def batch_of(case: Case) -> list[ReferenceTrajectory]:
    batch = trajectories()
    if case.equal_rewards:
        batch = [ReferenceTrajectory(**{**t, "reward": 0.5}) for t in batch]
    return batch


# -- the learner ---------------------------------------------------------------------------------


def save_gradients(folder: str, *meshes: str) -> None:
    """On every rank: gradient and loss of every case, in one micro-batch and in many."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in meshes:
        mesh = Mesh.of(mesh_config(name))
        found = gradients(Path(folder), mesh)
        if mesh.rank == 0:
            save_file(found, Path(folder) / f"{name}.safetensors")
        mesh.close()
    dist.destroy_process_group()


def gradients(folder: Path, mesh: Mesh) -> dict[str, Tensor]:
    """By case, limit and weight; on rank 0."""
    learner = Learner(load_shape(folder / "policy"), mesh, OptimConfig(lr=1.0), steps=1)
    reference = ReferencePolicy(learner, stream_tensors(folder / "reference"))
    return {
        f"{name}/{limit}/{key}": value
        for name, case in CASES.items()
        for limit in (ALL, ONE)
        for key, value in _gradient(case, limit, learner, reference, folder).items()
    }


def learner_batch(case: Case) -> Batch:
    return Batch.from_rows(
        [
            Row(
                id=i,
                group=t["group"],
                prompt_tokens=t["tokens"][: t["prompt_length"]],
                response_tokens=t["tokens"][t["prompt_length"] :],
                loss_mask=t["mask"],
                behaviour_log_probs=t["behaviour_log_prob"],
                reward=t["reward"],
                oldest_version=0,
            )
            for i, t in enumerate(batch_of(case))
        ]
    )


def _gradient(
    case: Case, limit: int, learner: Learner, reference: ReferencePolicy, folder: Path
) -> dict[str, Tensor]:
    settings = LearnerConfig(micro_batch_tokens=limit)
    terms = ObjectiveConfig.model_validate(case.objective)
    method = REGISTRY[case.estimator](**case.params)
    objective = Objective(method, terms, TEMPERATURE, reference if terms.kl else None)
    batch, shape, mesh = learner_batch(case), learner.shape, learner.mesh
    proximal_K = None
    if case.proximal:
        load_weights(learner.chunks, shape, mesh, stream_tensors(folder / "proximal"))
        _, proximal_K = score_proximal(learner, [batch, batch], objective, settings)
    load_weights(learner.chunks, shape, mesh, stream_tensors(folder / "policy"))
    loss, _, _ = policy_gradient(learner, batch, objective, settings, proximal_K=proximal_K)
    local = {
        parameter_name(name, index, shape, mesh): parameter.main_grad
        for index, chunk in enumerate(learner.chunks)
        for name, parameter in chunk.named_parameters()
    }
    found = {name: gradient.clone() for name, gradient in gathered(local, shape, mesh)}
    return found | {"loss": torch.tensor([loss], dtype=torch.float64)}


# -- the oracle ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """Of one case, in float64."""

    loss: float | None
    """None where the oracle has a surrogate of the same gradient and another value."""
    size: float
    """Sum of the loss's terms without their signs: what its error is to be measured by."""
    gradient: dict[str, Tensor]


def expected(case: Case, policies: Mapping[str, nn.Module]) -> Expected:
    """Autograd through the sum over trajectories and tokens; float64 models by `models`'s names."""
    policy, batch = policies["policy"], batch_of(case)
    policy.zero_grad(set_to_none=True)
    with torch.no_grad():
        current = [_loss_tokens(policy, t)[0] for t in batch]
        proximal = [_loss_tokens(policies["proximal"], t)[0] for t in batch]
        reference = [_loss_tokens(policies["reference"], t)[0] for t in batch]
    behaviour = [_recorded(t) for t in batch]
    if not case.proximal:
        proximal = current
    weights, factors = _weights(case, batch, current, proximal, behaviour)
    advantages = _leave_one_out(batch)
    total = sum(len(of_tokens) for of_tokens in current)
    aggregation = case.objective.get("aggregation", "token_sum")
    loss, size = torch.zeros((), dtype=torch.float64), 0.0
    for i, trajectory in enumerate(batch):
        log_prob, entropy = _loss_tokens(policy, trajectory)
        denominator = total if aggregation == "token_mean" else len(batch)
        if aggregation == "trajectory_mean":
            denominator *= max(1, len(log_prob))
        update = log_prob - proximal[i]
        if case.is_ppo:
            clipped = update.exp().clamp(0.8, 1.2)
            gain = torch.minimum(update.exp() * advantages[i], clipped * advantages[i])
            terms = -factors[i] * gain
        else:
            terms = -weights[i] * advantages[i] * log_prob
        if "kl" in case.objective:
            away = reference[i] - log_prob
            terms = terms + KL * weights[i] * (away.exp() - 1 - away)
        if "entropy_coefficient" in case.objective:
            terms = terms - ENTROPY * weights[i] * entropy
        loss = loss + terms.sum() / denominator
        size += float(terms.detach().abs().sum()) / denominator
    loss.backward()
    gradient = {
        name: parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for name, parameter in policy.named_parameters()
    }
    return Expected(None if case.is_ppo else float(loss.detach()), size, gradient)


def _loss_tokens(model: nn.Module, trajectory: ReferenceTrajectory) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies at the tokens with mask True."""
    first, tokens = trajectory["prompt_length"], torch.tensor(trajectory["tokens"])
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, first - 1 : -1] / TEMPERATURE
    log_p = logits.log_softmax(-1)[torch.tensor(trajectory["mask"])]
    target = tokens[first:][torch.tensor(trajectory["mask"])]
    return log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _recorded(trajectory: ReferenceTrajectory) -> Tensor:
    pairs = zip(trajectory["behaviour_log_prob"], trajectory["mask"], strict=True)
    return torch.tensor([b for b, used in pairs if used], dtype=torch.float64)


def _weights(
    case: Case,
    batch: list[ReferenceTrajectory],
    current: list[Tensor],
    proximal: list[Tensor],
    behaviour: list[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Each token's fixed weight, and the part of it that depends on proximal/behaviour alone."""
    mismatch = case.objective.get("mismatch", {})
    below = proximal if mismatch else behaviour
    ratios = [(c - b).tolist() for c, b in zip(current, below, strict=True)]
    members = [oracle.Member(math.fsum(r), len(r)) for r in ratios]
    groups = [t["group"] for t in batch]
    factors = []
    for p, b in zip(proximal, behaviour, strict=True):
        k = (p - b).exp()
        limits = case.params | mismatch
        if "cap" in limits:
            k = k.clamp(max=limits["cap"])
        elif "lower" in limits:
            k = k * ((k >= limits["lower"]) & (k <= limits["upper"]))
        factors.append(k if mismatch or case.is_ppo else torch.ones_like(k))
    if case.is_ppo:
        return factors, factors
    found = oracle.method_weights(case.estimator, case.params, members, groups, ratios)
    weights = [
        torch.tensor(w, dtype=torch.float64) * f for w, f in zip(found, factors, strict=True)
    ]
    return weights, factors


def _leave_one_out(batch: list[ReferenceTrajectory]) -> list[float]:
    found = []
    for i, one in enumerate(batch):
        others = [t["reward"] for j, t in enumerate(batch) if t["group"] == one["group"] and j != i]
        found.append(one["reward"] - math.fsum(others) / len(others))
    return found


if __name__ == "__main__":
    assert sys.argv[1] == "save_gradients", sys.argv
    save_gradients(*sys.argv[2:])
