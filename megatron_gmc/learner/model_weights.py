"""The policy's weights in and out of its sharded model, by Hugging Face names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.convert.inventory import Inventory
from megatron_gmc.convert.mapping import (
    EMBEDDING,
    OUTPUT,
    Layout,
    global_name,
    layouts,
    local_spec_name,
    shard,
    slot_view,
    stage_layers,
    stage_of,
    unshard,
)
from megatron_gmc.learner.mesh import Mesh


def initialise(model: GPTModel, shape: ModelShape, mesh: Mesh, seed: int) -> None:
    """Draw the weights as transformers does for Qwen3, the same for every mesh."""
    load_weights(model, shape, mesh, initial_weights(shape, seed))


def initial_weights(shape: ModelShape, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Freshly drawn weights, float32: normal with `shape.initializer_range`, norms at 1.

    Each tensor is drawn from a generator of its own, seeded by `seed` and the tensor's name.
    """
    for name, layout in layouts(shape).items():
        if len(layout.shape) == 1:
            yield name, torch.ones(layout.shape)
            continue
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        yield name, torch.randn(layout.shape, generator=generator) * shape.initializer_range


def load_weights(
    model: GPTModel, shape: ModelShape, mesh: Mesh, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Fill the model from (Hugging Face name, tensor) pairs in any order.

    Every rank passes all of the model's tensors and keeps its part, cast to the model's dtype.
    Raises ValueError by name for a missing, unexpected or repeated tensor, a wrong shape, and for
    an output layer that differs from the embedding it is tied to.
    """
    parameters = _parameters(model, shape, mesh)
    inventory = Inventory(shape)
    tie = _TiedPair()
    for name, tensor in tensors:
        if shape.tied and name in (EMBEDDING, OUTPUT):
            tie.see(name, tensor)
        layout = inventory.tick(name, tuple(tensor.shape))
        if layout is not None:
            _fill(parameters, layout, tensor, shape, mesh)
    inventory.finish()


class _TiedPair:
    """Folders of tied models may hold the output layer too; it must then equal the embedding."""

    def __init__(self) -> None:
        self._first: tuple[str, Tensor] | None = None

    def see(self, name: str, tensor: Tensor) -> None:
        if self._first is None or self._first[0] == name:
            self._first = (name, tensor)
        elif not torch.equal(self._first[1], tensor):
            raise ValueError(
                f"tensors {EMBEDDING} and {OUTPUT}: they differ, and config.json ties them; set "
                "tie_word_embeddings to false or remove the second"
            )


def _fill(
    parameters: Mapping[str, Tensor],
    layout: Layout,
    tensor: Tensor,
    shape: ModelShape,
    mesh: Mesh,
) -> None:
    for parameter in layout.parameters:
        if parameter in parameters:
            slot = slot_view(parameters[parameter], layout, shape)
            slot.copy_(
                shard(tensor, layout, mesh.tensor_size, mesh.tensor_rank).reshape(slot.shape)
            )


def _parameters(model: GPTModel, shape: ModelShape, mesh: Mesh) -> dict[str, Tensor]:
    """This rank's parameters, detached, by their Megatron names over the whole model."""
    return {
        parameter_name(name, shape, mesh): parameter.detach()
        for name, parameter in model.named_parameters()
    }


def parameter_name(name: str, shape: ModelShape, mesh: Mesh) -> str:
    """The key under which `gathered` expects what belongs to the model's parameter `name`."""
    first_layer = stage_layers(shape.layers, mesh.pipeline_size, mesh.pipeline_rank).start
    return global_name(local_spec_name(name), first_layer)


def named_weights(model: GPTModel, shape: ModelShape, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """The weights by Hugging Face name, in the model's dtype: see `gathered`."""
    return gathered(_parameters(model, shape, mesh), shape, mesh)


def gathered(
    local: Mapping[str, Tensor], shape: ModelShape, mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors in Hugging Face names and shapes on global rank 0, one at a time.

    `local` holds this rank's tensors (weights, or gradients) by `parameter_name`, shaped like its
    parameters and of one dtype. Collective: every rank iterates to the end, and all but rank 0
    get nothing. What is yielded shares no memory with `local`; beyond `local`, twice the largest
    tensor is held.
    """
    if mesh.data_rank != 0:
        return
    dtype = next(iter(local.values())).dtype
    for layout in layouts(shape).values():
        stage = stage_of(layout, shape.layers, mesh.pipeline_size)
        whole = None
        if mesh.pipeline_rank == stage:
            whole = _gather_slices(local[layout.parameters[0]], layout, shape, mesh)
        if stage != 0 and mesh.tensor_rank == 0:
            whole = _bring_to_first_stage(whole, stage, layout, dtype, mesh)
        if mesh.rank == 0:
            assert whole is not None
            yield layout.name, whole


def _gather_slices(
    parameter: Tensor, layout: Layout, shape: ModelShape, mesh: Mesh
) -> Tensor | None:
    """The whole tensor on tensor rank 0, None on the others."""
    part = slot_view(parameter, layout, shape)
    if part.dim() > len(layout.shape):
        part = part.flatten(0, 1)
    part = part.contiguous()
    if layout.split_dim is None or mesh.tensor_size == 1:
        return unshard([part], layout) if mesh.tensor_rank == 0 else None
    first = mesh.tensor_rank == 0
    parts = [torch.empty_like(part) for _ in range(mesh.tensor_size)] if first else None
    dist.gather(
        part, parts, dst=dist.get_global_rank(mesh.tensor_group, 0), group=mesh.tensor_group
    )
    return unshard(parts, layout) if parts is not None else None


def _bring_to_first_stage(
    whole: Tensor | None, stage: int, layout: Layout, dtype: torch.dtype, mesh: Mesh
) -> Tensor | None:
    """Move a tensor from `stage` to stage 0; returns it there and None elsewhere."""
    group = mesh.pipeline_group
    if mesh.pipeline_rank == stage:
        assert whole is not None
        dist.send(whole, dst=dist.get_global_rank(group, 0), group=group)
    if mesh.pipeline_rank != 0:
        return None
    received = torch.empty(layout.shape, dtype=dtype, device=mesh.device)
    dist.recv(received, src=dist.get_global_rank(group, stage), group=group)
    return received
