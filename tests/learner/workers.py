"""What the ranks of the learner's tests run: `python -m tests.learner.workers function args…`.

Results go to files under the folder that the test passes, for the test to compare.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
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
from megatron_gmc.learner.log_probs import token_log_probs
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model import build_model
from megatron_gmc.learner.model_weights import (
    gathered,
    initialise,
    load_weights,
    named_weights,
    parameter_name,
)
from tests.learner.inputs import TEMPERATURE, log_prob_input, model_input, model_rows

Results = dict[str, Tensor | dict[str, Tensor] | dict[str, bool]]


def check_meshes(folder: str, *meshes: str) -> None:
    """Every check on every mesh, given as tensor x pipeline; the world is joined once."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in meshes:
        tensor, pipeline = (int(size) for size in name.split("x"))
        mesh = Mesh.create(tensor, pipeline)
        for kind in ("tied", "untied"):
            source = Path(folder) / kind
            _save(Path(folder) / f"{kind}-{name}", _policy(source, mesh), mesh)
        _save(Path(folder) / f"log_probs-{name}", _log_probs(mesh), mesh)
        _save_place(Path(folder) / f"place-{name}", mesh)
        mesh.close()
    dist.destroy_process_group()


def _save(stem: Path, results: Mapping[str, object], mesh: Mesh) -> None:
    if results:
        torch.save(results, f"{stem}.rank{mesh.rank}.pt")


def _save_place(stem: Path, mesh: Mesh) -> None:
    place = {
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
    _save(stem, place, mesh)


def _policy(source: Path, mesh: Mesh) -> Results:
    """Weights out again, logits, log-probs and the gradient of a weighted sum of them."""
    shape = load_shape(source)
    model = build_model(shape, mesh)
    results: Results = {}
    initialise(model, shape, mesh, seed=7)
    results["initial"] = dict(named_weights(model, shape, mesh))
    load_weights(model, shape, mesh, stream_tensors(source))
    results["weights"] = dict(named_weights(model, shape, mesh))
    results["halves"] = _halves(shape, mesh, source)
    results["sharded"] = {
        parameter_name(name, shape, mesh): getattr(parameter, "tensor_model_parallel", False)
        for name, parameter in model.named_parameters()
    }
    results |= _forward_backward(model, shape, mesh)
    return {key: value for key, value in results.items() if len(value)}


def _halves(shape: ModelShape, mesh: Mesh, source: Path) -> dict[str, Tensor]:
    model = build_model(shape, mesh, torch.bfloat16)
    load_weights(model, shape, mesh, ((n, t.bfloat16()) for n, t in stream_tensors(source)))
    return dict(named_weights(model, shape, mesh))


def _forward_backward(model: GPTModel, shape: ModelShape, mesh: Mesh) -> Results:
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    model.config.finalize_model_grads_func = finalize_model_grads
    wrapped.zero_grad_buffer()
    tokens, positions = model_input()
    rows, targets, weights = model_rows()
    seen: Results = {}

    def forward_step(_data: Iterator[object], stage: DistributedDataParallel) -> object:
        def loss(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            seen["logits"] = logits.detach()
            log_probs = token_log_probs(
                logits[rows],
                targets,
                temperature=TEMPERATURE,
                vocab_size=shape.vocab_size,
                mesh=mesh,
            )
            seen["log_probs"] = log_probs.detach()
            return (weights * log_probs).sum(), {}

        return stage(tokens, positions, None), loss

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=None,
        model=wrapped,
        num_microbatches=1,
        seq_length=tokens.shape[1],
        micro_batch_size=tokens.shape[0],
        forward_only=False,
    )
    local = {parameter_name(n, shape, mesh): p.main_grad for n, p in model.named_parameters()}
    return seen | {"gradient": dict(gathered(local, shape, mesh))}


def _log_probs(mesh: Mesh) -> dict[str, object]:
    """Log-probs and logits' gradients of this rank's columns, case by case."""
    results: dict[str, object] = {}
    for name, case in log_prob_input().items():
        columns = case.padded_logits(mesh.tensor_size).chunk(mesh.tensor_size, -1)
        logits = columns[mesh.tensor_rank].clone().requires_grad_()
        before = logits.detach().clone()
        log_probs = token_log_probs(
            logits,
            case.targets,
            temperature=case.temperature,
            vocab_size=case.vocab_size,
            mesh=mesh,
        )
        (log_probs * case.weights).sum().backward()
        untouched = torch.equal(before, logits.detach())
        results[name] = (log_probs.detach(), logits.grad, untouched)
    return results


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
