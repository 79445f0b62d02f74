"""What the ranks of the learner's tests run: `python -m tests.learner.workers function args…`.

Results go to files under the folder that the test passes, for the test to compare.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_gmc.convert.hf_config import ModelShape, load_shape
from megatron_gmc.convert.hugging_face import stream_tensors
from megatron_gmc.learner import output_head
from megatron_gmc.learner.core_attention import pack_of
from megatron_gmc.learner.log_probs import token_scores
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model import build_model
from megatron_gmc.learner.model_weights import (
    gathered,
    initialise,
    load_weights,
    named_weights,
    parameter_name,
)
from tests.learner.inputs import LENGTHS, TEMPERATURE, loss_tokens, pack_tokens

Results = dict[str, Tensor | dict[str, Tensor] | dict[str, bool]]


def create_mesh(name: str) -> Mesh:
    """The mesh that a name such as t2p2v3e2s says: tensor, pipeline, virtual pipeline, expert,
    context (c) and sequence parallel; what is not said is 1."""
    sizes = {axis: int(size) for axis, size in re.findall(r"([tpvec])(\d+)", name)}
    return Mesh.create(
        sizes.get("t", 1),
        sizes.get("p", 1),
        virtual_pipeline=sizes.get("v", 1),
        expert=sizes.get("e", 1),
        context=sizes.get("c", 1),
        sequence_parallel="s" in name,
    )


def check_models(folder: str, *runs: str) -> None:
    """Every run, given as model:mesh, those of one mesh in a row; the world is joined once."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pairs = [run.split(":") for run in runs]
    for name, models in itertools.groupby(pairs, key=lambda pair: pair[1]):
        mesh = create_mesh(name)
        for model, _ in models:
            _save(Path(folder) / f"{model}-{name}", _policy(Path(folder) / model, mesh), mesh)
        _save(Path(folder) / f"place-{name}", _place(mesh), mesh)
        mesh.close()
    dist.destroy_process_group()


def _save(stem: Path, results: Mapping[str, object], mesh: Mesh) -> None:
    torch.save(results, f"{stem}.rank{mesh.rank}.pt")


def _place(mesh: Mesh) -> dict[str, object]:
    return {
        "tensor": (mesh.tensor_rank, mesh.tensor_size),
        "pipeline": (mesh.pipeline_rank, mesh.pipeline_size),
        "data": (mesh.data_rank, mesh.data_size),
        "stage": (mesh.is_first_stage, mesh.is_last_stage),
        "groups": [
            dist.get_process_group_ranks(group)
            for group in (
                mesh.tensor_group,
                mesh.pipeline_group,
                mesh.data_group,
                mesh.model_group,
            )
        ],
    }


def _policy(source: Path, mesh: Mesh) -> Results:
    """Weights out again, logits, log-probs and the gradient of a weighted sum of them."""
    shape = load_shape(source)
    chunks = build_model(shape, mesh)
    results: Results = {}
    initialise(chunks, shape, mesh, seed=7)
    results["initial"] = dict(named_weights(chunks, shape, mesh))
    load_weights(chunks, shape, mesh, stream_tensors(source))
    results["weights"] = dict(named_weights(chunks, shape, mesh))
    results["halves"] = _halves(shape, mesh, source)
    results["sharded"] = {
        parameter_name(name, index, shape, mesh): getattr(parameter, "tensor_model_parallel", False)
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    results |= _forward_backward(chunks, shape, mesh)
    return {key: value for key, value in results.items() if len(value)}


def _halves(shape: ModelShape, mesh: Mesh, source: Path) -> dict[str, Tensor]:
    chunks = build_model(shape, mesh, torch.bfloat16)
    load_weights(chunks, shape, mesh, ((n, t.bfloat16()) for n, t in stream_tensors(source)))
    return dict(named_weights(chunks, shape, mesh))


def _forward_backward(chunks: Sequence[GPTModel], shape: ModelShape, mesh: Mesh) -> Results:
    config = chunks[0].config
    settings = DistributedDataParallelConfig()
    wrapped = [DistributedDataParallel(config, settings, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    pack = pack_of(LENGTHS, size=1, rank=0, device=mesh.device)
    at_K, target_K, weight_K = loss_tokens()
    seen: Results = {}

    def forward_step(_data: Iterator[object], chunk: DistributedDataParallel) -> object:
        def loss(hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            seen["logits"] = output_head.logits(chunk.module, hidden)[0].detach()
            scores = token_scores(
                chunk.module,
                hidden,
                at_K,
                target_K,
                temperature=TEMPERATURE,
                vocab_size=shape.vocab_size,
                mesh=mesh,
            )
            seen["log_probs"] = scores.log_prob_K.detach()
            return (weight_K * scores.log_prob_K).sum(), {}

        return chunk(pack_tokens()[None], None, None, packed_seq_params=pack), loss

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(()) for _ in wrapped] if len(wrapped) > 1 else iter(()),
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        # Interleaved stages take turns; the mean over equal micro-batches is one's gradient.
        num_microbatches=mesh.pipeline_size,
        seq_length=sum(LENGTHS),
        micro_batch_size=1,
        forward_only=False,
    )
    local = {
        parameter_name(name, index, shape, mesh): parameter.main_grad
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    return seen | {"gradient": dict(gathered(local, shape, mesh))}


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
