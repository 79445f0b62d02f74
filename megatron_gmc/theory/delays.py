"""A small policy with shared parameters, trained at an exact lag with exact log-probs.

A few prompts, each answered by `length` tokens; the logits of the next token are linear in random
features of (prompt, position, previous token), so every update moves all prompts. All sequences
can be listed, so J and its gradient are exact; only the sampled groups are random. Seeds run
side by side as one tensor axis R.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_gmc.estimators import Estimator, advantages
from megatron_gmc.theory.groups import group_index, token_coefficients

OptimizerKind = Literal["sgd", "adam"]


@dataclass(frozen=True, eq=False)
class Environment:
    """States are (prompt, position, previous token), flattened; L sequences for each prompt."""

    features: Tensor
    """float64 [states, V, D]: of each next token in each state."""
    state_XLT: Tensor
    """int64 [prompts, L, T]: state at each position of each sequence."""
    token_LT: Tensor
    """int64 [L, T]."""
    reward_XL: Tensor
    """float64 [prompts, L], between 0 and 1."""

    def log_tables(self, theta_RD: Tensor) -> Tensor:
        """Log-probs of the next token in every state, float64 [R, states, V]."""
        return torch.einsum("svd,rd->rsv", self.features, theta_RD).log_softmax(-1)

    def sequence_log_probs(self, table_RSV: Tensor) -> Tensor:
        """float64 [R, prompts, L]."""
        each = table_RSV[:, self.state_XLT, self.token_LT.expand_as(self.state_XLT)]
        return each.sum(-1)

    def value(self, table_RSV: Tensor) -> Tensor:
        """Exact J, the mean over prompts of the expected reward; float64 [R]."""
        expected_RX = (self.sequence_log_probs(table_RSV).exp() * self.reward_XL).sum(-1)
        return expected_RX.mean(1)


def make_environment(
    *, prompts: int = 4, vocabulary: int = 4, length: int = 5, width: int = 24, seed: int = 0
) -> Environment:
    """The environment of a seed. The reward is the share of tokens that match a prompt's target,
    to the fourth power, so that the start is nearly blind and the gradient is steep later on."""
    generator = torch.Generator().manual_seed(seed)
    states = prompts * length * (vocabulary + 1)
    features = torch.randn(states, vocabulary, width, generator=generator, dtype=torch.float64) / (
        width**0.5
    )
    token_LT = torch.cartesian_prod(*[torch.arange(vocabulary)] * length)
    first = torch.full((len(token_LT), 1), vocabulary)
    previous_LT = torch.cat([first, token_LT[:, :-1]], 1)
    position_LT = torch.arange(length).expand_as(token_LT)
    inside_LT = position_LT * (vocabulary + 1) + previous_LT
    offset_X = torch.arange(prompts) * (length * (vocabulary + 1))
    target_XT = torch.randint(vocabulary, (prompts, length), generator=generator)
    match_XL = (token_LT[None] == target_XT[:, None]).double().mean(-1)
    return Environment(features, offset_X[:, None, None] + inside_LT, token_LT, match_XL**4)


@dataclass(frozen=True)
class Training:
    """How a run goes; every method sees the same random numbers for a seed."""

    lag: int
    step_size: float
    steps: int = 300
    group_size: int = 8
    seeds: int = 16
    optimizer: OptimizerKind = "sgd"
    first_seed: int = 0


@dataclass(frozen=True, eq=False)
class Course:
    """What a run went through."""

    value: Tensor
    """J before each step, float64 [steps, R]."""
    weight: Tensor
    """Σ|w·A| / Σ|A| over each step's tokens, the share that survives, float64 [steps, R]; NaN
    where every advantage of a seed is 0."""
    theta: Tensor
    """Parameters after the last step, float64 [R, D]."""


def train(environment: Environment, estimator: Estimator, training: Training) -> Course:
    """Train from uniform logits at an exact lag: the batch of step k comes from max(0, k − lag).

    One group of `group_size` for each prompt, leave-one-out advantages, the token sum as the
    score, one update a batch. Adam has β = (0.9, 0.999) and δ = 1e-8.
    """
    width = environment.features.shape[-1]
    theta_RD = torch.zeros(training.seeds, width, dtype=torch.float64)
    generator = torch.Generator().manual_seed(training.first_seed)
    tables: list[Tensor] = []
    step = _Stepper(training.optimizer, training.step_size, theta_RD)
    values, weights = [], []
    for k in range(training.steps):
        table_RSV = environment.log_tables(theta_RD)
        tables = [*tables[-training.lag :], table_RSV] if training.lag else [table_RSV]
        values.append(environment.value(table_RSV))
        batch = _sample(environment, tables[0], training.group_size, generator)
        gradient_RD, weight_R = _gradient(environment, estimator, batch, table_RSV)
        weights.append(weight_R)
        theta_RD = step.ascend(theta_RD, gradient_RD, k + 1)
    return Course(torch.stack(values), torch.stack(weights), theta_RD)


@dataclass(frozen=True, eq=False)
class _Batch:
    state_NT: Tensor
    token_NT: Tensor
    seed_N: Tensor
    reward_N: Tensor
    behaviour_log_prob_NT: Tensor
    group_size: int


def _sample(
    environment: Environment, table_RSV: Tensor, group_size: int, generator: torch.Generator
) -> _Batch:
    log_prob_RXL = environment.sequence_log_probs(table_RSV)
    seeds, prompts, _ = log_prob_RXL.shape
    # Inverse cdf on common random numbers: at equal policies every method gets the same samples.
    uniform_RXG = torch.rand(seeds, prompts, group_size, generator=generator, dtype=torch.float64)
    cdf_RXL = log_prob_RXL.exp().cumsum(-1)
    chosen_RXG = torch.searchsorted(cdf_RXL, uniform_RXG * cdf_RXL[..., -1:])
    prompt_RXG = torch.arange(prompts)[None, :, None].expand_as(chosen_RXG)
    chosen_N, prompt_N = chosen_RXG.reshape(-1), prompt_RXG.reshape(-1)
    seed_N = group_index(seeds, prompts * group_size)
    state_NT = environment.state_XLT[prompt_N, chosen_N]
    token_NT = environment.token_LT[chosen_N]
    return _Batch(
        state_NT=state_NT,
        token_NT=token_NT,
        seed_N=seed_N,
        reward_N=environment.reward_XL[prompt_N, chosen_N],
        behaviour_log_prob_NT=table_RSV[seed_N[:, None], state_NT, token_NT],
        group_size=group_size,
    )


def _gradient(
    environment: Environment, estimator: Estimator, batch: _Batch, table_RSV: Tensor
) -> tuple[Tensor, Tensor]:
    seed_N1 = batch.seed_N[:, None]
    log_ratio_NT = table_RSV[seed_N1, batch.state_NT, batch.token_NT] - batch.behaviour_log_prob_NT
    trajectories = len(batch.reward_N)
    groups = trajectories // batch.group_size
    group_N = group_index(groups, batch.group_size)
    coefficient_NT = token_coefficients(estimator, log_ratio_NT, batch.reward_N, group_N, groups)
    # Σ coefficient · (φ(s, a) − E_π φ(s, ·)), gathered on the states before it meets the features.
    push_RSV = torch.zeros_like(table_RSV)
    where = (seed_N1.expand_as(batch.state_NT), batch.state_NT)
    push_RSV.index_put_((*where, batch.token_NT), coefficient_NT, accumulate=True)
    total_RS1 = push_RSV.sum(-1, keepdim=True)
    push_RSV = push_RSV - total_RS1 * table_RSV.exp()
    gradient_RD = torch.einsum("rsv,svd->rd", push_RSV, environment.features)
    advantage_N = advantages(batch.reward_N, group_N, groups, "leave_one_out").double().abs()
    seeds = len(table_RSV)
    kept_R = coefficient_NT.abs().mean(1).reshape(seeds, -1).sum(1)
    weight_R = kept_R / advantage_N.reshape(seeds, -1).sum(1)
    return gradient_RD * (seeds / trajectories), weight_R


class _Stepper:
    def __init__(self, kind: OptimizerKind, step_size: float, like: Tensor) -> None:
        self._kind = kind
        self._step_size = step_size
        self._first, self._second = torch.zeros_like(like), torch.zeros_like(like)

    def ascend(self, theta: Tensor, gradient: Tensor, count: int) -> Tensor:
        if self._kind == "sgd":
            return theta + self._step_size * gradient
        self._first = 0.9 * self._first + 0.1 * gradient
        self._second = 0.999 * self._second + 0.001 * gradient.square()
        mean = self._first / (1 - 0.9**count)
        scale = (self._second / (1 - 0.999**count)).sqrt() + 1e-8
        return theta + self._step_size * mean / scale
