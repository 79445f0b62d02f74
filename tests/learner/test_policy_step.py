"""A policy step's edges: nothing to learn from, values that are not finite, what is reported."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_gmc.config import LearnerConfig, ObjectiveConfig
from megatron_gmc.errors import NonFiniteError
from megatron_gmc.estimators import ESTIMATORS
from megatron_gmc.learner.batch import Batch, Row
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.policy_step import Objective, policy_gradient, policy_step
from tests.learner.steps import ADAMW, DISTRIBUTED, imitate, new_learner, random_rows

NAN, INF = float("nan"), float("inf")
GMC = Objective(ESTIMATORS["gmc"](), ObjectiveConfig(), 1.0)
PLAIN_IS = Objective(ESTIMATORS["is"](), ObjectiveConfig(), 1.0)
METHODS = ("gmc", "none", "is", "tic_clip", "tic_mask", "grpo")
TWO_PASSES = LearnerConfig(micro_batch_tokens=16)
NOTHING_SKIPPED = LearnerConfig(skip_zero_advantage=False)


@pytest.fixture
def learner(folder: Path, mesh: Mesh) -> Learner:
    """In warm-up, with one step behind it, so that there are moments."""
    learner = new_learner(folder, mesh, ADAMW)
    imitate(learner, 1)
    return learner


def tensors_in(tree: object) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from tensors_in(part)
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from tensors_in(part)


def state(learner: Learner) -> list[Tensor]:
    """Weights, moments and step counts, copied."""
    moments = list(tensors_in(copy.deepcopy(learner.optimizer.state_dict())))
    assert len(moments) >= 2
    return [p.detach().clone() for p in learner.chunks[0].parameters()] + moments


def assert_untouched(before: list[Tensor], learner: Learner) -> None:
    after = state(learner)
    assert len(after) == len(before)
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))


def masked(row: Row) -> Row:
    return replace(row, loss_mask=[False] * len(row.loss_mask))


def with_first(row: Row, log_prob: float) -> Row:
    return replace(row, behaviour_log_probs=[log_prob, *row.behaviour_log_probs[1:]])


def gradient_of(learner: Learner, rows: list[Row], objective: Objective) -> Tensor:
    policy_gradient(learner, Batch.from_rows(rows), objective, NOTHING_SKIPPED)
    return torch.cat([p.main_grad.flatten() for p in learner.chunks[0].parameters()])


# -- nothing to learn from ---------------------------------------------------------------------


@pytest.mark.parametrize("settings", [LearnerConfig(), TWO_PASSES])
@pytest.mark.parametrize("name", METHODS)
def test_a_batch_without_a_loss_token(learner: Learner, name: str, settings: LearnerConfig) -> None:
    """R7: the optimizer is not stepped, it is counted, and the schedule goes on."""
    before, rate = state(learner), learner.learning_rate
    rows = [masked(row) for row in random_rows(2)]
    objective = Objective(ESTIMATORS[name](), ObjectiveConfig(), 1.0)
    metrics = policy_step(learner, Batch.from_rows(rows), objective, settings)
    assert_untouched(before, learner)
    assert (metrics["step/skipped"], metrics["grad_norm"], metrics["loss"]) == (1, 0, 0)
    assert learner.version == 2
    assert learner.learning_rate == pytest.approx(2 * rate)


def test_a_skipped_step_with_a_sharded_optimizer(folder: Path, mesh: Mesh) -> None:
    """R7."""
    learner = new_learner(folder, mesh, DISTRIBUTED)
    imitate(learner, 1)
    before = [p.detach().clone() for p in learner.chunks[0].parameters()]
    rows = [masked(row) for row in random_rows(2)]
    assert policy_step(learner, Batch.from_rows(rows), GMC, LearnerConfig())["step/skipped"] == 1
    after = list(learner.chunks[0].parameters())
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))


def test_a_trajectory_without_a_loss_token_is_no_reason_to_skip(learner: Learner) -> None:
    """R7."""
    before = state(learner)
    first, *rest = random_rows(2)
    metrics = policy_step(learner, Batch.from_rows([masked(first), *rest]), GMC, LearnerConfig())
    assert metrics["step/skipped"] == 0
    assert not torch.equal(before[0], next(iter(learner.chunks[0].parameters())))
    assert all(torch.isfinite(p).all() for p in learner.chunks[0].parameters())


def test_rewards_that_are_all_equal(learner: Learner) -> None:
    """No gradient, but a step: weight decay and moments go on as with any gradient of 0."""
    rows = [replace(row, reward=0.1) for row in random_rows(2)]
    metrics = policy_step(learner, Batch.from_rows(rows), GMC, LearnerConfig())
    assert (metrics["grad_norm"], metrics["step/skipped"]) == (0, 0)
    assert metrics["advantage/zero_group_share"] == 1


# -- not finite --------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [LearnerConfig(), TWO_PASSES])
@pytest.mark.parametrize("log_prob", [NAN, -INF])
@pytest.mark.parametrize("name", METHODS)
def test_a_behaviour_log_prob_that_is_not_finite(
    learner: Learner, name: str, log_prob: float, settings: LearnerConfig
) -> None:
    """Stopped before the optimizer, with the trajectory's place and id; behind T6's refusal.

    Its group's mass is not finite either, yet the other members are not blamed.
    """
    before, rate = state(learner), learner.learning_rate
    rows = random_rows(2)
    rows[3] = with_first(rows[3], log_prob)
    objective = Objective(ESTIMATORS[name](), ObjectiveConfig(), 1.0)
    with pytest.raises(NonFiniteError, match=r"trajectories that are not finite: 103$") as caught:
        policy_step(learner, Batch.from_rows(rows), objective, settings)
    assert caught.value.trajectories == (3,)
    assert_untouched(before, learner)
    assert (learner.version, learner.learning_rate) == (1, rate)


def test_masked_positions_may_hold_anything(learner: Learner) -> None:
    """R4."""
    rows = random_rows(2)
    rows = [replace(row, loss_mask=[False, *row.loss_mask[1:]]) for row in rows]
    expected = gradient_of(learner, rows, GMC)
    for log_prob in (NAN, INF, -INF):
        changed = [with_first(row, log_prob) for row in rows]
        assert torch.equal(gradient_of(learner, changed, GMC), expected)


def test_a_group_that_has_become_impossible(learner: Learner) -> None:
    """R3: ratios of 0 give weight 0, are counted, and leave the other groups as they were."""
    rows = random_rows(2)
    gone = [with_first(row, INF) if row.group == 0 else row for row in rows]
    without = [replace(row, reward=0.0) if row.group == 0 else row for row in rows]
    expected = gradient_of(learner, without, GMC)
    assert torch.equal(gradient_of(learner, gone, GMC), expected)
    assert expected.norm() > 0
    metrics = policy_step(learner, Batch.from_rows(gone), GMC, LearnerConfig())
    assert metrics["ratio/minus_inf_trajectories"] == 2


def test_an_advantage_of_0_beside_a_weight_without_bounds(learner: Learner) -> None:
    """R5: ℓ = 1000 where the group's rewards are equal contributes exactly 0."""
    rows = [replace(row, reward=0.5) if row.group == 0 else row for row in random_rows(2)]
    huge = [with_first(row, -1000.0) if row.id == 100 else row for row in rows]
    expected = gradient_of(learner, rows, PLAIN_IS)
    assert torch.equal(gradient_of(learner, huge, PLAIN_IS), expected)
    assert expected.norm() > 0


def test_a_weight_that_float32_cannot_hold(learner: Learner) -> None:
    """Where the advantage is not 0, it would make the gradient infinite."""
    before = state(learner)
    rows = [with_first(row, -1000.0) if row.id == 102 else row for row in random_rows(2)]
    with pytest.raises(NonFiniteError, match=r"not finite: 102$"):
        policy_step(learner, Batch.from_rows(rows), PLAIN_IS, LearnerConfig())
    assert_untouched(before, learner)
    metrics = policy_step(learner, Batch.from_rows(rows), GMC, LearnerConfig())
    assert metrics["step/skipped"] == 0


def test_weights_of_the_policy_that_are_not_finite(learner: Learner) -> None:
    with torch.no_grad():
        next(iter(learner.chunks[0].parameters())).fill_(NAN)
    with pytest.raises(NonFiniteError):
        policy_step(learner, Batch.from_rows(random_rows(2)), GMC, LearnerConfig())
    assert learner.version == 1


# -- what is reported --------------------------------------------------------------------------


def test_both_ways_report_the_same(folder: Path, mesh: Mesh) -> None:
    reports = []
    for settings in (LearnerConfig(), LearnerConfig(passes="two_pass"), TWO_PASSES):
        learner = new_learner(folder, mesh, ADAMW)
        reports.append(policy_step(learner, Batch.from_rows(random_rows(2)), GMC, settings))
    assert [report.pop("step/two_pass") for report in reports] == [0, 1, 1]
    for report in reports[1:]:
        assert report == pytest.approx(reports[0], rel=1e-5, abs=1e-6)
    assert reports[0]["learning_rate"] == pytest.approx(0.01 / 3)


def test_lags_count_from_the_oldest_token(learner: Learner) -> None:
    """L7: versions of the batch against the learner's own."""
    learner.version = 9
    rows = [replace(row, oldest_version=9 - (row.id - 100) // 2) for row in random_rows(2)]
    metrics = policy_step(learner, Batch.from_rows(rows), GMC, LearnerConfig())
    lags = {name: value for name, value in metrics.items() if name.startswith("lag/")}
    third = pytest.approx(1 / 3)
    assert lags == {
        "lag/mean": 1,
        "lag/min": 0,
        "lag/max": 2,
        **{f"lag/share_{lag}": third for lag in (0, 1, 2)},
    }


def test_a_batch_that_does_not_fit(learner: Learner) -> None:
    """S5."""
    batch = Batch.from_rows(random_rows(2))
    longest = int(batch.length_N.max())
    with pytest.raises(ValueError, match=rf"{longest - 1} is less .* raise it to {longest} or"):
        policy_step(learner, batch, GMC, LearnerConfig(micro_batch_tokens=longest - 1))
    assert learner.version == 1
