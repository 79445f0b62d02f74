"""Megatron's optimizer and schedule as the config means them, against torch and closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.optim_config import OptimConfig
from tests.learner.steps import new_learner

LR = 0.02


def parameters(learner: Learner) -> dict[str, Tensor]:
    return dict(learner.chunks[0].named_parameters())


def copied(learner: Learner) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters(learner).items()}


def gradient(learner: Learner, seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Random numbers put where a backward pass leaves the gradient; returned as well."""
    learner.model[0].zero_grad_buffer()
    learner.optimizer.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, parameter in parameters(learner).items():
        drawn[name] = torch.randn(parameter.shape, generator=generator) * scale
        parameter.main_grad.copy_(drawn[name])
    return drawn


def is_norm(name: str) -> bool:
    return "norm" in name


# -- schedule: the factor of the n-th of 10 steps, 3 of them warm-up ---------------------------

STEPS, WARMUP = 10, 3


def after_warmup(n: int) -> float:
    """How far the n-th step is from the last warm-up step (0) to one past the run (1)."""
    return (n - WARMUP) / (STEPS + 1 - WARMUP)


SCHEDULES: dict[str, Callable[[int], float]] = {
    "constant": lambda n: 1.0,
    "linear": lambda n: 1 - after_warmup(n),
    "cosine": lambda n: (1 + math.cos(math.pi * after_warmup(n))) / 2,
    "wsd": lambda n: min(1.0, (STEPS + 1 - n) / 4),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule(folder: Path, mesh: Mesh, schedule: str) -> None:
    """No step is spent at learning rate 0, neither the first of warm-up nor the last of decay."""
    decay = {"decay_steps": 4} if schedule == "wsd" else {}
    optim = OptimConfig(name="sgd", lr=LR, warmup_steps=WARMUP, schedule=schedule, **decay)
    learner = new_learner(folder, mesh, optim, STEPS)
    for n in range(1, STEPS + 1):
        expected = LR * (n / WARMUP if n <= WARMUP else SCHEDULES[schedule](n))
        assert expected > 0
        before, drawn = copied(learner), gradient(learner, n)
        learner.apply()
        assert learner.version == n
        assert learner.learning_rate == pytest.approx(expected)
        for name, parameter in parameters(learner).items():
            moved = before[name] - expected * drawn[name]
            torch.testing.assert_close(parameter.detach(), moved, rtol=0, atol=1e-6)


def test_without_warm_up_the_first_step_is_whole(folder: Path, mesh: Mesh) -> None:
    learner = new_learner(folder, mesh, OptimConfig(name="sgd", lr=LR), STEPS)
    before, drawn = copied(learner), gradient(learner, 0)
    learner.apply()
    for name, parameter in parameters(learner).items():
        torch.testing.assert_close(parameter.detach(), before[name] - LR * drawn[name])


def test_a_run_that_ends_in_warm_up(folder: Path, mesh: Mesh) -> None:
    learner = new_learner(folder, mesh, OptimConfig(lr=LR, warmup_steps=8), 2)
    for n in (1, 2):
        gradient(learner, n)
        learner.apply()
        assert learner.learning_rate == pytest.approx(LR * n / 8)


# -- optimizers against torch's ----------------------------------------------------------------


def decayed_and_not(
    weights: Mapping[str, Tensor], decay: float
) -> list[dict[str, float | list[Tensor]]]:
    """torch's parameter groups: weight decay on matrices, none on norms."""
    return [
        {"params": [w for n, w in weights.items() if not is_norm(n)], "weight_decay": decay},
        {"params": [w for n, w in weights.items() if is_norm(n)], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("distributed", [False, True])
def test_adamw(folder: Path, mesh: Mesh, distributed: bool) -> None:
    optim = OptimConfig(
        lr=LR, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.3, distributed=distributed
    )
    learner = new_learner(folder, mesh, optim, STEPS)
    theirs = copied(learner)
    reference = torch.optim.AdamW(decayed_and_not(theirs, 0.3), lr=LR, betas=(0.8, 0.95), eps=1e-4)
    assert_same_steps(learner, theirs, reference)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(folder: Path, mesh: Mesh, momentum: float) -> None:
    optim = OptimConfig(name="sgd", lr=LR, momentum=momentum, weight_decay=0.3)
    learner = new_learner(folder, mesh, optim, STEPS)
    theirs = copied(learner)
    reference = torch.optim.SGD(decayed_and_not(theirs, 0.3), lr=LR, momentum=momentum)
    assert_same_steps(learner, theirs, reference)


def assert_same_steps(
    learner: Learner, theirs: dict[str, Tensor], reference: torch.optim.Optimizer
) -> None:
    before = copied(learner)
    for seed in range(3):
        for name, drawn in gradient(learner, seed).items():
            theirs[name].grad = drawn
        learner.apply()
        reference.step()
        for name, parameter in parameters(learner).items():
            torch.testing.assert_close(parameter.detach(), theirs[name], rtol=0, atol=1e-6)
    assert all(not torch.equal(theirs[name], before[name]) for name in theirs)


def test_weight_decay_leaves_norms_alone(folder: Path, mesh: Mesh) -> None:
    """A gradient of 0 shows what decay does by itself: weights shrink by lr · decay."""
    learner = new_learner(folder, mesh, OptimConfig(lr=LR, weight_decay=0.5), STEPS)
    before = copied(learner)
    gradient(learner, 0, scale=0.0)
    learner.apply()
    norms = 0
    for name, parameter in parameters(learner).items():
        if is_norm(name):
            norms += 1
            assert torch.equal(parameter.detach(), before[name]), name
        else:
            torch.testing.assert_close(parameter.detach(), before[name] * (1 - LR * 0.5))
    # Of 6 layers: before attention, before the MLP, queries, keys; and the last one.
    assert norms == 6 * 4 + 1


# -- clipping ----------------------------------------------------------------------------------


def norm_of(drawn: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in drawn.values()))


@pytest.mark.parametrize("distributed", [False, True])
def test_clipping_by_the_global_norm(folder: Path, mesh: Mesh, distributed: bool) -> None:
    # SGD cannot be sharded; AdamW's first step shows clipping only through its eps.
    optim = OptimConfig(lr=LR, eps=1.0, clip_grad=2.0, distributed=distributed)
    learner = new_learner(folder, mesh, optim, STEPS)
    before, drawn = copied(learner), gradient(learner, 0)
    norm = norm_of(drawn)
    assert norm > 20
    assert learner.apply() == pytest.approx(norm, rel=1e-5)
    for name, parameter in parameters(learner).items():
        clipped = drawn[name] * (2.0 / norm)
        expected = before[name] - LR * clipped / (clipped.abs() + 1.0)
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("limit", "scale"), [(None, 1.0), (2.0, 1e-4)])
def test_no_clipping(folder: Path, mesh: Mesh, limit: float | None, scale: float) -> None:
    """Without a limit, and under it."""
    optim = OptimConfig(name="sgd", lr=1.0, clip_grad=limit)
    learner = new_learner(folder, mesh, optim, STEPS)
    before, drawn = copied(learner), gradient(learner, 0, scale)
    assert learner.apply() == pytest.approx(norm_of(drawn), rel=1e-5)
    for name, parameter in parameters(learner).items():
        torch.testing.assert_close(parameter.detach(), before[name] - drawn[name])
