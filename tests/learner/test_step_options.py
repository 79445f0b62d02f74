"""A policy step's options: groups left out, records, a reference policy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_gmc.config import KLConfig, LearnerConfig, ObjectiveConfig
from megatron_gmc.convert.hugging_face import stream_tensors
from megatron_gmc.errors import NonFiniteError
from megatron_gmc.estimators import ESTIMATORS, TruncatedMismatch
from megatron_gmc.learner.batch import Batch, Row
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.policy_step import (
    Objective,
    StepRecord,
    policy_gradient,
    policy_step,
    score_proximal,
)
from megatron_gmc.learner.reference import ReferencePolicy
from tests.learner.steps import ADAMW, DISTRIBUTED, imitate, new_learner, random_rows
from tests.models import save_tiny_model, tiny_model

TEMPERATURE = 0.7
GMC = Objective(ESTIMATORS["gmc"](), ObjectiveConfig(), TEMPERATURE)
SKIPPING, WHOLE = LearnerConfig(), LearnerConfig(skip_zero_advantage=False)


@pytest.fixture
def learner(folder: Path, mesh: Mesh) -> Learner:
    return new_learner(folder, mesh, ADAMW)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same architecture."""
    target = tmp_path_factory.mktemp("other")
    tiny_model("qwen3", tied=True, seed=5).save_pretrained(target)
    return target


def mixed_rows() -> list[Row]:
    """Three groups of two; the rewards of the middle one are equal."""
    return [replace(row, reward=0.5) if row.group == 1 else row for row in random_rows(2)]


def gradient_of(learner: Learner, objective: Objective, settings: LearnerConfig) -> Tensor:
    policy_gradient(learner, Batch.from_rows(mixed_rows()), objective, settings)
    return torch.cat([p.main_grad.flatten() for p in learner.chunks[0].parameters()])


def weights_of(learner: Learner) -> list[Tensor]:
    return [p.detach().clone() for p in learner.chunks[0].parameters()]


@contextmanager
def tokens_seen(learner: Learner) -> Iterator[list[int]]:
    """How many tokens each forward put through the model."""
    seen: list[int] = []
    hook = learner.chunks[0].embedding.register_forward_pre_hook(
        lambda module, arguments, options: seen.append(options["input_ids"].numel()),
        with_kwargs=True,
    )
    yield seen
    hook.remove()


def with_kl(learner: Learner, other: Path, coefficient: float = 0.1) -> Objective:
    settings = ObjectiveConfig(kl=KLConfig(coefficient=coefficient))
    reference = ReferencePolicy(learner, stream_tensors(other))
    return Objective(ESTIMATORS["gmc"](), settings, TEMPERATURE, reference)


# -- groups without signal -----------------------------------------------------------------------


@pytest.mark.parametrize("limit", [4096, 16])
def test_what_has_no_signal_is_left_out(learner: Learner, limit: int) -> None:
    """The gradient stays, with its denominators; G1: a group of equal rewards has no part in it."""
    lengths = Batch.from_rows(mixed_rows()).length_N
    settings = SKIPPING.model_copy(update={"micro_batch_tokens": limit})
    with tokens_seen(learner) as seen:
        found = gradient_of(learner, GMC, settings)
    passes = 1 if limit == 4096 else 2
    assert sum(seen) == passes * int(lengths[[0, 1, 4, 5]].sum())
    expected = gradient_of(learner, GMC, WHOLE)
    assert expected.norm() > 0
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_what_is_left_out_is_reported(folder: Path, mesh: Mesh) -> None:
    """Ratios and weights are those of the other groups, lags and advantages those of all."""
    batch = Batch.from_rows(mixed_rows())
    reports = [
        policy_step(new_learner(folder, mesh, ADAMW), batch, GMC, settings)
        for settings in (SKIPPING, WHOLE)
    ]
    assert [report["step/left_out_share"] for report in reports] == pytest.approx([1 / 3, 0])
    for name in ("loss", "grad_norm", "lag/mean", "lag/share_0", "advantage/zero_group_share"):
        assert reports[0][name] == pytest.approx(reports[1][name], rel=1e-5)
    rest = Batch.from_rows([row for row in mixed_rows() if row.group != 1])
    alone = policy_step(new_learner(folder, mesh, ADAMW), rest, GMC, WHOLE)
    for name in (name for name in alone if name.startswith("ratio/")):
        assert reports[0][name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("gmc", ObjectiveConfig(entropy_coefficient=0.1)),
        ("gmc_pooled", ObjectiveConfig()),
        ("m2po", ObjectiveConfig()),
    ],
    ids=["entropy", "pooled", "m2po"],
)
def test_nothing_is_left_out_where_it_matters(
    learner: Learner, method: str, settings: ObjectiveConfig
) -> None:
    objective = Objective(ESTIMATORS[method](), settings, TEMPERATURE)
    with tokens_seen(learner) as seen:
        gradient_of(learner, objective, SKIPPING)
    assert seen == [int(Batch.from_rows(mixed_rows()).length_N.sum())]


def test_a_batch_without_any_signal(learner: Learner) -> None:
    """A step all the same: weight decay and moments go on; no trajectory went through the model."""
    imitate(learner, 1)
    batch = Batch.from_rows([replace(row, reward=0.1) for row in random_rows(2)])
    with tokens_seen(learner) as seen:
        metrics = policy_step(learner, batch, GMC, SKIPPING)
    assert sum(seen) <= 1  # a pack is at least one token of padding
    assert (metrics["loss"], metrics["grad_norm"], metrics["step/skipped"]) == (0, 0, 0)
    assert (metrics["step/left_out_share"], metrics["advantage/zero_group_share"]) == (1, 1)
    assert learner.version == 2
    assert not any(name.startswith("ratio/") for name in metrics)


# -- records -------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [4096, 16])
def test_a_record_of_every_token(folder: Path, mesh: Mesh, limit: int) -> None:
    """Log-probs before the step by transformers, in the batch's order; NaN for what was left."""
    learner, rows = new_learner(folder, mesh, ADAMW), mixed_rows()
    rows[0] = replace(rows[0], loss_mask=[False, *rows[0].loss_mask[1:]])
    batch = Batch.from_rows(rows)
    settings = SKIPPING.model_copy(update={"micro_batch_tokens": limit})
    records: list[StepRecord] = []
    metrics = policy_step(learner, batch, GMC, settings, seen=records.append)
    (record,) = records
    model, expected, ratios = tiny_model("qwen3", tied=True), [], []
    for row in rows:
        tokens = torch.tensor([*row.prompt_tokens, *row.response_tokens])
        with torch.no_grad():
            log_p = (model(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        mask, first = torch.tensor(row.loss_mask), len(row.prompt_tokens)
        log_prob = log_p[first - 1 : -1].gather(-1, tokens[first:, None])[mask, 0]
        ratio = log_prob.double() - torch.tensor(row.behaviour_log_probs)[mask]
        expected.append(log_prob if row.group != 1 else torch.full_like(log_prob, math.nan))
        ratios.append(float(ratio.sum()) if row.group != 1 else math.nan)
    torch.testing.assert_close(
        record.log_prob_K, torch.cat(expected), rtol=0, atol=2e-5, equal_nan=True
    )
    ratio_N = torch.tensor(ratios, dtype=torch.float64)
    torch.testing.assert_close(record.log_ratio_N, ratio_N, rtol=0, atol=1e-4, equal_nan=True)
    weight_N = record.weight_N[[0, 1, 4, 5]]
    assert metrics["ratio/retained_mass"] == pytest.approx(float(weight_N.mean()))
    assert record.weight_N[[2, 3]].isnan().all()
    assert record.advantage_N[[2, 3]].tolist() == [0, 0]


# -- proximal and reference policies -------------------------------------------------------------


def test_a_proximal_policy_is_scored_where_it_is_read(learner: Learner) -> None:
    batches = [Batch.from_rows(random_rows(seed)) for seed in (2, 3, 4)]
    mismatch = ObjectiveConfig(mismatch=TruncatedMismatch())
    factored = Objective(ESTIMATORS["gmc"](), mismatch, TEMPERATURE)
    decoupled = Objective(ESTIMATORS["decoupled_ppo"](), ObjectiveConfig(), TEMPERATURE)
    with tokens_seen(learner) as seen:
        assert score_proximal(learner, batches, GMC, WHOLE) == [None] * 3
        assert score_proximal(learner, batches[:1], decoupled, WHOLE) == [None]
    assert seen == []
    for objective in (factored, decoupled):
        first, second, third = score_proximal(learner, batches, objective, WHOLE)
        assert first is None
        assert third is not None
        records: list[StepRecord] = []
        policy_step(learner, batches[1], GMC, WHOLE, seen=records.append)
        (record,) = records
        torch.testing.assert_close(second, record.log_prob_K)


@pytest.mark.parametrize("optim", [ADAMW, DISTRIBUTED], ids=["plain", "sharded"])
def test_the_policy_is_as_it_was_after_the_references_turn(
    folder: Path, mesh: Mesh, other: Path, optim: object
) -> None:
    """To the bit, and the next update is the one without a reference."""
    kept, plain = (new_learner(folder, mesh, optim) for _ in range(2))  # type: ignore[arg-type]
    for learner in (kept, plain):
        imitate(learner, 1)
    before = weights_of(kept)
    reference = ReferencePolicy(kept, stream_tensors(other))
    assert all(torch.equal(a, b) for a, b in zip(weights_of(kept), before, strict=True))
    with pytest.raises(RuntimeError, match="in its turn"), reference.in_place(kept):
        assert dict(kept.weights()).keys() == dict(stream_tensors(other)).keys()
        assert all(torch.equal(w, dict(stream_tensors(other))[n]) for n, w in kept.weights())
        raise RuntimeError("in its turn")
    assert all(torch.equal(a, b) for a, b in zip(weights_of(kept), before, strict=True))
    for learner in (kept, plain):
        imitate(learner, 2)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(kept), weights_of(plain), strict=True))


def test_a_policy_at_its_reference_is_not_held(learner: Learner, folder: Path, other: Path) -> None:
    """Equal weights have equal log-probs to the last bit: no KL, and no gradient of one."""
    alone = gradient_of(learner, GMC, WHOLE)
    at_reference = with_kl(learner, folder, coefficient=100.0)
    torch.testing.assert_close(gradient_of(learner, at_reference, WHOLE), alone, rtol=0, atol=0)
    batch = Batch.from_rows(mixed_rows())
    assert policy_step(learner, batch, at_reference, WHOLE)["reference/k3_kl"] == 0
    assert policy_step(learner, batch, with_kl(learner, other), WHOLE)["reference/k3_kl"] > 0.1


def test_tensors_that_are_not_a_references(learner: Learner, tmp_path: Path) -> None:
    before = weights_of(learner)
    wrong = save_tiny_model(tmp_path / "qwen2", "qwen2", tied=True)
    with pytest.raises(ValueError, match="tensor"):
        ReferencePolicy(learner, stream_tensors(wrong))
    assert all(torch.equal(a, b) for a, b in zip(weights_of(learner), before, strict=True))


def test_a_reference_that_is_not_finite(learner: Learner, folder: Path) -> None:
    """The step is stopped before the optimizer; every trajectory is at fault."""
    spoilt = ((n, t * math.nan if "norm" in n else t) for n, t in stream_tensors(folder))
    settings = ObjectiveConfig(kl=KLConfig(coefficient=0.1))
    objective = Objective(
        ESTIMATORS["gmc"](), settings, TEMPERATURE, ReferencePolicy(learner, spoilt)
    )
    with pytest.raises(NonFiniteError) as caught:
        policy_step(learner, Batch.from_rows(mixed_rows()), objective, WHOLE)
    assert caught.value.trajectories == tuple(range(6))
    assert learner.version == 0
