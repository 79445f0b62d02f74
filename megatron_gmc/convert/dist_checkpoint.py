"""Megatron dist-checkpoints read and written one parameter at a time.

No model is built, no process group is needed and no whole model is in memory: the checkpoint is
the one that megatron-core's `torch_dist` backend writes, and loads on any mesh. Parameters of
layers lie under one key for all layers, stacked: [layers, …], those of a mixture's experts
[layers, experts, …]; everything stands as it does without tensor parallelism.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_gmc.convert.dist_metadata import COMMON, FORMAT, read_metadata, stored_bytes
from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.convert.mapping import Layout, layouts, slot_view

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.local_experts\.(\d+)\.(.+)")
# Megatron keys a norm as transformer-engine does, inside the linear layer that follows it.
_STORED_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
# Layers of megatron that keep an object beside their weight, empty without fp8.
_WITH_OBJECT = re.compile(r"(.+\.linear_(?:proj|qkv|fc1|fc2))\.weight")
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
GetTensor = Callable[[str], Tensor]


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter of the whole model, and the Hugging Face tensors that fill it."""

    key: str
    """Its key in the checkpoint."""
    place: tuple[int, ...]
    """Where it lies in the stack under its key: (), (layer,) or (layer, expert)."""
    stack: tuple[int, ...]
    """The size of that stack: (), (layers,) or (layers, experts)."""
    shape: tuple[int, ...]
    """Without the stack's dimensions and without padding of the vocabulary."""
    tensors: tuple[Layout, ...]


def parameters(shape: ModelShape) -> list[Parameter]:
    """Every parameter that a checkpoint of this model holds, first layer first."""
    filled: dict[str, list[Layout]] = {}
    for layout in layouts(shape).values():
        # A tied output layer is the embedding, and is stored once.
        filled.setdefault(layout.parameters[0], []).append(layout)
    return [_parameter(name, tuple(tensors), shape) for name, tensors in filled.items()]


def _parameter(name: str, tensors: tuple[Layout, ...], shape: ModelShape) -> Parameter:
    rows = sum(tensor.shape[0] for tensor in tensors)
    size = (rows, *tensors[0].shape[1:])
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        key = f"decoder.layers.mlp.experts.experts.{expert[3]}"
        place = (int(expert[1]), int(expert[2]))
        return Parameter(key, place, (shape.layers, shape.experts), size, tensors)
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        key = f"decoder.layers.{_STORED_NAMES.get(layer[2], layer[2])}"
        return Parameter(key, (int(layer[1]),), (shape.layers,), size, tensors)
    return Parameter(name, (), (), size, tensors)


def read_tensors(folder: Path, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors of the checkpoint in `folder`, one at a time, in its own dtype.

    Tensors of one parameter may share memory, which nobody else holds. Memory: two of the largest
    parameters. Raises ValueError where the checkpoint is damaged, is another model's, or holds a
    pickle that would run something.
    """
    index = read_metadata(folder)
    for parameter in parameters(shape):
        whole = _read(folder, index, parameter)
        for layout in parameter.tensors:
            part = slot_view(whole, layout, shape)
            yield layout.name, part.reshape(layout.shape)


def stored_dtype(folder: Path, shape: ModelShape) -> torch.dtype:
    """The dtype of the checkpoint's weights; raises ValueError as `read_tensors`."""
    first = parameters(shape)[0].key
    return _stored(folder, read_metadata(folder), first).properties.dtype


def _stored(folder: Path, index: Metadata, key: str) -> TensorStorageMetadata:
    stored = index.state_dict_metadata.get(key)
    if not isinstance(stored, TensorStorageMetadata):
        raise ValueError(f"{folder} has no tensor {key}, which the model needs")
    return stored


def _read(folder: Path, index: Metadata, parameter: Parameter) -> Tensor:
    stored = _stored(folder, index, parameter.key)
    depth = len(parameter.stack)
    stack, size = tuple(stored.size)[:depth], tuple(stored.size)[depth:]
    if stack != parameter.stack or not _fits(size, parameter):
        raise ValueError(
            f"{folder}: {parameter.key} has the shape {tuple(stored.size)}, and the model's is "
            f"{(*parameter.stack, *parameter.shape)}"
        )
    whole = torch.empty(parameter.shape, dtype=stored.properties.dtype)
    filled = 0
    for chunk in stored.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        inside = [at - start for at, start in zip(parameter.place, offsets, strict=False)]
        if not all(0 <= at < size for at, size in zip(inside, sizes, strict=False)):
            continue
        part = _load(folder, index, MetadataIndex(parameter.key, chunk.offsets))[tuple(inside)]
        offsets, sizes = offsets[depth:], sizes[depth:]
        if sizes == parameter.shape:
            return part
        # Padding of the vocabulary lies past the end.
        rows = max(0, min(sizes[0], parameter.shape[0] - offsets[0]))
        place = tuple(slice(o, o + s) for o, s in zip(offsets, (rows, *sizes[1:]), strict=True))
        whole[place] = part[:rows]
        filled += whole[place].numel()
    if filled != whole.numel():
        raise ValueError(f"{folder}: {parameter.key} is not whole; the checkpoint is damaged")
    return whole


def _fits(size: tuple[int, ...], parameter: Parameter) -> bool:
    """Whether a stored size is the parameter's, or its vocabulary's with padding."""
    padded = parameter.tensors[0].vocabulary and size[0] > parameter.shape[0]
    return size == parameter.shape or (padded and size[1:] == parameter.shape[1:])


def _load(folder: Path, index: Metadata, part: MetadataIndex) -> Tensor:
    content = stored_bytes(folder, index, part)
    try:
        loaded = torch.load(content, weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{folder}: {part.fqn} is damaged: {reason}") from None
    assert isinstance(loaded, Tensor)
    return loaded


def write_checkpoint(folder: Path, shape: ModelShape, get: GetTensor, dtype: torch.dtype) -> None:
    """Write a checkpoint of the model's weights into the empty `folder`.

    `get` gives a Hugging Face tensor by name, and is called once for each; the weights are stored
    as `dtype`. Memory: three of the largest parameters. Raises OSError where writing fails.
    """
    planner = _Planner(shape, get, dtype)
    writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
    with warnings.catch_warnings():
        # One process is what is meant.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save({}, storage_writer=writer, planner=planner, no_dist=True)
    torch.save({}, folder / COMMON)
    (folder / FORMAT).write_text(json.dumps(_FORMAT), encoding="utf-8")


class _Planner(SavePlanner):
    """Lists what is to be written, and makes each parameter only when its turn comes."""

    def __init__(self, shape: ModelShape, get: GetTensor, dtype: torch.dtype) -> None:
        self._shape = shape
        self._get = get
        self._dtype = dtype
        self._parameters: dict[MetadataIndex, Parameter] = {}

    def set_up_planner(
        self,
        state_dict: Mapping[str, object],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing is taken from the state dict: the planner has its own list."""

    def create_local_plan(self) -> SavePlan:
        mine = parameters(self._shape)
        objects = [self._object_item(p) for p in mine if _WITH_OBJECT.fullmatch(p.key)]
        return SavePlan([self._tensor_item(parameter) for parameter in mine] + objects)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            content = io.BytesIO()
            torch.save([None], content)
            content.seek(0)
            return content
        parameter = self._parameters[write_item.index]
        whole = torch.empty(parameter.shape, dtype=self._dtype)
        for layout in parameter.tensors:
            slot = slot_view(whole, layout, self._shape)
            slot.copy_(self._get(layout.name).reshape(slot.shape))
        return whole[(None,) * len(parameter.stack)]

    def _tensor_item(self, parameter: Parameter) -> WriteItem:
        offsets = torch.Size([*parameter.place, *(0 for _ in parameter.shape)])
        sizes = torch.Size([*(1 for _ in parameter.stack), *parameter.shape])
        index = MetadataIndex(parameter.key, offsets)
        self._parameters[index] = parameter
        return WriteItem(
            index=index,
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, sizes),
                properties=TensorProperties(dtype=self._dtype),
                size=torch.Size([*parameter.stack, *parameter.shape]),
            ),
        )

    def _object_item(self, parameter: Parameter) -> WriteItem:
        place, stack = (".".join(map(str, n)) for n in (parameter.place, parameter.stack))
        key = f"{parameter.key.removesuffix('weight')}_extra_state/shard_{place}_{stack}"
        return WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)
