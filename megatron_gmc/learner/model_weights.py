"""The policy's weights in and out of its sharded model, by Hugging Face names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_gmc.convert.experts import separated
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


def initialise(chunks: Sequence[GPTModel], shape: ModelShape, mesh: Mesh, seed: int) -> None:
    """Draw the weights as transformers does, the same for every mesh."""
    load_weights(chunks, shape, mesh, initial_weights(shape, seed))


def initial_weights(shape: ModelShape, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Freshly drawn weights, float32: normal with `shape.initializer_range`, norms at 1,
    biases at 0.

    Each tensor is drawn from a generator of its own, seeded by `seed` and the tensor's name.
    """
    for name, layout in layouts(shape).items():
        if len(layout.shape) == 1:
            yield name, (torch.zeros if name.endswith(".bias") else torch.ones)(layout.shape)
            continue
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        yield name, torch.randn(layout.shape, generator=generator) * shape.initializer_range


def load_weights(
    chunks: Sequence[GPTModel],
    shape: ModelShape,
    mesh: Mesh,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Fill this rank's chunks of the model from (Hugging Face name, tensor) pairs in any order.

    Every rank passes all of the model's tensors and keeps its part, cast to the model's dtype. A
    mixture's experts may come one by one or as transformers stacks them: see `separated`.
    Raises ValueError by name for a missing, unexpected or repeated tensor, a wrong shape, and for
    an output layer that differs from the embedding it is tied to.
    """
    parameters = _parameters(chunks, shape, mesh)
    inventory = Inventory(shape)
    tie = _TiedPair()
    for name, tensor in tensors:
        if shape.tied and name in (EMBEDDING, OUTPUT):
            tie.see(name, tensor)
        for part, matrix in separated(name, tensor, shape):
            layout = inventory.tick(part, tuple(matrix.shape))
            if layout is not None:
                _fill(parameters, layout, matrix, shape, mesh)
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


def _parameters(chunks: Sequence[GPTModel], shape: ModelShape, mesh: Mesh) -> dict[str, Tensor]:
    """This rank's parameters, detached, by their Megatron names over the whole model."""
    return {
        parameter_name(name, index, shape, mesh): parameter.detach()
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def parameter_name(name: str, chunk_index: int, shape: ModelShape, mesh: Mesh) -> str:
    """The key under which `gathered` expects what belongs to a parameter.

    `name` is the parameter's in the chunk of this rank that has `chunk_index`.
    """
    chunk_layers = stage_layers(
        shape.layers, mesh.pipeline_size, mesh.pipeline_rank, mesh.virtual_size, chunk_index
    )
    first_expert = shape.experts // mesh.expert_size * mesh.expert_rank
    return global_name(local_spec_name(name), chunk_layers.start, first_expert)


def named_weights(
    chunks: Sequence[GPTModel], shape: ModelShape, mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """The weights by Hugging Face name, in the model's dtype: see `gathered`."""
    return gathered(_parameters(chunks, shape, mesh), shape, mesh)


def gathered(
    local: Mapping[str, Tensor], shape: ModelShape, mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors in Hugging Face names and shapes on global rank 0, one at a time.

    `local` holds this rank's tensors (weights, or gradients) by `parameter_name`, shaped like its
    parameters and of one dtype. Collective: every rank iterates to the end, and all but rank 0
    get nothing. What is yielded shares no memory with `local`; beyond `local`, twice the largest
    tensor is held.
    """
    dtype = next(iter(local.values())).dtype
    for layout in layouts(shape).values():
        source = _first_holder(layout, shape, mesh)
        whole = None
        if source <= mesh.rank < source + mesh.tensor_size:
            whole = _gather_slices(local[layout.parameters[0]], layout, shape, mesh)
        if source != 0:
            whole = _bring_to_first_rank(whole, source, layout, dtype, mesh)
        if mesh.rank == 0:
            assert whole is not None
            yield layout.name, whole


def _first_holder(layout: Layout, shape: ModelShape, mesh: Mesh) -> int:
    """The lowest global rank that holds a slice; its tensor neighbours hold the others.

    Follows the order in which a mesh lays out its ranks: see mesh.py.
    """
    stage, _ = stage_of(layout, shape.layers, mesh.pipeline_size, mesh.virtual_size)
    first = stage * (mesh.world_size // mesh.pipeline_size)
    if layout.expert is None:
        return first
    return first + layout.expert // (shape.experts // mesh.expert_size) * mesh.tensor_size


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


def _bring_to_first_rank(
    whole: Tensor | None, source: int, layout: Layout, dtype: torch.dtype, mesh: Mesh
) -> Tensor | None:
    """Move a tensor from global rank `source` to global rank 0; returns it there, else None."""
    if mesh.rank == source:
        assert whole is not None
        dist.send(whole, dst=0)
    if mesh.rank != 0:
        return None
    received = torch.empty(layout.shape, dtype=dtype, device=mesh.device)
    dist.recv(received, src=source)
    return received
