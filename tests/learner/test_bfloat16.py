"""bfloat16 weights: what is kept in float32 beside them, and what that is held to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_gmc.learner.batch import Batch
from megatron_gmc.learner.checkpoint import load_learner, save_learner
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.log_probs import TokenScores
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.micro_batch import MicroBatch, micro_batches_of
from megatron_gmc.learner.plan import plan_micro_batches
from megatron_gmc.optim_config import OptimConfig
from tests.learner.steps import ADAMW, imitate, new_learner, random_rows, weights_of
from tests.qwen3 import tiny_qwen3

STEP = 1e-5
"""Far less than half of what parts two bfloat16 numbers near the weights, which are about 0.1."""


@pytest.mark.parametrize("distributed", [False, True])
def test_steps_too_small_for_bfloat16_are_not_lost(
    folder: Path, mesh: Mesh, distributed: bool
) -> None:
    """Twenty small steps on float32 weights, as torch's AdamW takes them, then rounded."""
    optim = OptimConfig(lr=STEP, eps=1e-12, distributed=distributed)
    learner = new_learner(folder, mesh, optim, dtype=torch.bfloat16, steps=20)
    parameters = dict(learner.chunks[0].named_parameters())
    theirs = {name: p.detach().float().clone() for name, p in parameters.items()}
    start = {name: p.detach().clone() for name, p in parameters.items()}
    reference = torch.optim.AdamW(list(theirs.values()), lr=STEP, eps=1e-12, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    drawn = {n: torch.randn(p.shape, generator=generator) for n, p in parameters.items()}
    for _ in range(20):
        learner.model[0].zero_grad_buffer()
        learner.optimizer.zero_grad()
        for name, parameter in parameters.items():
            parameter.main_grad.copy_(drawn[name])
            theirs[name].grad = drawn[name].clone()
        learner.apply()
        reference.step()
    moved = 0
    for name, parameter in parameters.items():
        assert parameter.dtype == torch.bfloat16
        torch.testing.assert_close(parameter.detach(), theirs[name].bfloat16(), rtol=8e-3, atol=0)
        assert torch.equal(parameter.detach(), theirs[name].bfloat16()) or distributed
        moved += int((parameter.detach() != start[name]).sum())
    assert moved > 0


def log_probs(learner: Learner, batch: Batch) -> Tensor:
    plan = plan_micro_batches(
        batch.length_N,
        batch.group_N,
        limits=learner.limits,
        token_limit=64,
        scope="trajectory",
        passes="auto",
    )
    found = torch.zeros(int(batch.loss_mask_S.sum()))

    def take(micro_batch: MicroBatch, scores: TokenScores) -> Tensor:
        assert scores.log_prob_K.dtype == torch.float32
        found[micro_batch.place_K] = scores.log_prob_K
        return scores.log_prob_K.new_zeros(())

    learner.run(micro_batches_of(batch, plan, learner.mesh), take, forward_only=True)
    return found


def test_log_probs_are_those_of_the_model_to_bfloat16s_rounding(folder: Path, mesh: Mesh) -> None:
    batch = Batch.from_rows(random_rows(1))
    model = tiny_qwen3(tied=True).double()
    expected, start = [], 0
    for length in batch.length_N.tolist():
        tokens = batch.tokens_S[start : start + length]
        with torch.no_grad():
            all_K = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        chosen = all_K.gather(-1, tokens[1:, None])[:, 0]
        expected.append(chosen[batch.loss_mask_S[start + 1 : start + length]])
        start += length
    theirs = torch.cat(expected)
    exact = log_probs(new_learner(folder, mesh, ADAMW), batch)
    rounded = log_probs(new_learner(folder, mesh, ADAMW, dtype=torch.bfloat16), batch)
    assert float((exact - theirs).abs().max()) < 1e-5
    assert 1e-5 < float((rounded - theirs).abs().max()) < 0.15


def test_a_resumed_run_goes_on_as_if_nothing_had_been(
    folder: Path, mesh: Mesh, tmp_path: Path
) -> None:
    """The weights in float32 come back too: without them small steps would begin anew."""
    learner = new_learner(folder, mesh, ADAMW, dtype=torch.bfloat16)
    imitate(learner, 1)
    save_learner(tmp_path / "saved", learner)
    imitate(learner, 2)
    resumed = new_learner(folder, mesh, ADAMW, dtype=torch.bfloat16)
    load_learner(tmp_path / "saved", resumed)
    imitate(resumed, 2)
    ours, theirs = weights_of(resumed), weights_of(learner)
    assert all(tensor.dtype == torch.bfloat16 for tensor in ours.values())
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_weights_start_as_the_folder_has_them(folder: Path, mesh: Mesh) -> None:
    source = load_file(folder / "model.safetensors")
    learner = new_learner(folder, mesh, ADAMW, dtype=torch.bfloat16)
    for name, tensor in weights_of(learner).items():
        assert torch.equal(tensor, source[name].bfloat16()), name
