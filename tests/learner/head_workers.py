"""What the ranks of test_log_probs.py run: `python -m tests.learner.head_workers check …`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gmc.learner import log_probs, output_head
from megatron_gmc.learner.mesh import Mesh
from tests.learner.head_inputs import HIDDEN, PADDED, TOKENS, HeadCase, head_cases, qwen3_case

Result = dict[str, Tensor]


def check(folder: str, *meshes: str) -> None:
    """Every case on every mesh, `2` or `2sp`: tensor ranks, with sequence parallelism or not."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in meshes:
        mesh = Mesh.create(int(name[0]), 1, sequence_parallel=name.endswith("sp"))
        torch.save(results(mesh), Path(folder) / f"{name}.rank{mesh.rank}.pt")
        mesh.close()
    dist.destroy_process_group()


def results(mesh: Mesh) -> dict[str, Result]:
    # Twenty columns at a time for seven tokens: several blocks, and a last short one.
    log_probs.BLOCK_ELEMENTS["cpu"] = 20 * 7
    cases = head_cases() | {"qwen3": qwen3_case()}
    return {name: _scores(case, mesh) for name, case in cases.items()}


def head_model(mesh: Mesh, *, tied: bool, dtype: torch.dtype = torch.float64) -> GPTModel:
    """A policy of one layer whose head is what counts, as megatron-core builds it."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        tensor_model_parallel_size=mesh.tensor_size,
        sequence_parallel=mesh.sequence_parallel,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=PADDED,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    )
    return model.to(dtype)


def _scores(case: HeadCase, mesh: Mesh) -> Result:
    """Scores and gradients: the weight's own rows, and this rank's part of the hidden states."""
    model = head_model(mesh, tied=case.tied, dtype=case.weight.dtype)
    output_head.install(model)
    weight = output_head.head_weight(model)
    with torch.no_grad():
        weight.copy_(case.weight.chunk(mesh.tensor_size)[mesh.tensor_rank])
    hidden = case.hidden
    if mesh.sequence_parallel:
        hidden = hidden.chunk(mesh.tensor_size, 1)[mesh.tensor_rank]
    hidden = hidden.clone().requires_grad_()
    seen: Result = {}
    for asked in (False, True):
        weight.grad = hidden.grad = None
        scores = log_probs.token_scores(
            model,
            hidden,
            case.at_K,
            case.target_K,
            temperature=case.temperature,
            vocab_size=case.vocab_size,
            mesh=mesh,
            entropy=asked,
        )
        loss = (scores.log_prob_K * case.log_prob_gradient_K).sum()
        if scores.entropy_K is not None:
            seen["entropy"] = scores.entropy_K.detach()
            loss = loss + (scores.entropy_K * case.entropy_gradient_K).sum()
        loss.backward()
        suffix = " with entropy" if asked else ""
        seen[f"log_prob{suffix}"] = scores.log_prob_K.detach()
        assert hidden.grad is not None
        assert weight.grad is not None
        seen[f"hidden{suffix}"] = hidden.grad
        seen[f"weight{suffix}"] = weight.grad
    seen["logits"] = output_head.logits(model, hidden.detach())
    return seen


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
