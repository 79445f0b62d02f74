"""Where each Hugging Face tensor of a model lies in megatron-core's GPTModel.

Pure names and layouts, no process groups. Names are those of megatron-core's local layer spec;
`local_spec_name` brings transformer-engine's names to them.

Two Megatron parameters hold several Hugging Face tensors. `linear_qkv` stacks, query group by
query group, the group's query heads, its key head and its value head; `linear_fc1` stacks gate and
up projection. A *slot* is the part of a parameter that one tensor fills. Tensor parallelism cuts
both parameters so that a rank's slot is the rank's slice of the Hugging Face tensor, so one
description serves whole and sharded parameters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_gmc.convert.hf_config import ModelShape

Slot = Literal["whole", "query", "key", "value", "gate", "up"]

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"

_EMBEDDING_PARAMETER = "embedding.word_embeddings.weight"
_OUTPUT_PARAMETER = "output_layer.weight"
_LAYER = "decoder.layers."
_MLP_NORM = "pre_mlp_layernorm"
_EXPERTS = "experts.local_experts."
_GROUPED = re.compile(r"experts\.(linear_fc[12])\.weight(\d+)$")


@dataclass(frozen=True)
class Layout:
    """Where one Hugging Face tensor lies."""

    name: str
    """Its Hugging Face name."""
    shape: tuple[int, ...]
    """Its Hugging Face shape."""
    parameters: tuple[str, ...]
    """The Megatron parameters that hold it, layers numbered over the whole model. Two for a tied
    embedding, of which a pipeline keeps a copy in its last stage."""
    slot: Slot
    split_dim: int | None = None
    """The dimension that tensor parallelism cuts; None where every rank holds the tensor."""
    vocabulary: bool = False
    """Whether its rows are the vocabulary, which is padded to a multiple of the tensor ranks."""
    expert: int | None = None
    """The expert it belongs to, numbered over the layer; None outside a mixture's experts."""


def layouts(shape: ModelShape) -> dict[str, Layout]:
    """The layout of every tensor of the model, by Hugging Face name, first layer first."""
    vocabulary = (shape.vocab_size, shape.hidden)
    embedding = (_EMBEDDING_PARAMETER,) + ((_OUTPUT_PARAMETER,) if shape.tied else ())
    tensors = [Layout(EMBEDDING, vocabulary, embedding, "whole", 0, True)]
    for layer in range(shape.layers):
        tensors += _layer(shape, layer)
    tensors.append(
        Layout(
            "model.norm.weight",
            (shape.hidden,),
            ("decoder.final_layernorm.weight",),
            "whole",
        )
    )
    if not shape.tied:
        tensors.append(Layout(OUTPUT, vocabulary, (_OUTPUT_PARAMETER,), "whole", 0, True))
    return {tensor.name: tensor for tensor in tensors}


def _layer(shape: ModelShape, layer: int) -> list[Layout]:
    prefix, parameters = f"model.layers.{layer}", f"{_LAYER}{layer}"
    norms = [("input_layernorm", "input_layernorm"), ("post_attention_layernorm", _MLP_NORM)]
    tensors = [
        Layout(f"{prefix}.{name}.weight", (shape.hidden,), (f"{parameters}.{own}.weight",), "whole")
        for name, own in norms
    ]
    tensors[1:1] = _attention(shape, f"{prefix}.self_attn", f"{parameters}.self_attention")
    mlp, own_mlp = f"{prefix}.mlp", f"{parameters}.mlp"
    if not shape.experts:
        return tensors + _mlp(shape, mlp, own_mlp)
    gate = (shape.experts, shape.hidden)
    tensors.append(Layout(f"{mlp}.gate.weight", gate, (f"{own_mlp}.router.weight",), "whole"))
    for expert in range(shape.experts):
        own = f"{own_mlp}.{_EXPERTS}{expert}"
        tensors += _mlp(shape, f"{mlp}.experts.{expert}", own, expert)
    return tensors


def _attention(shape: ModelShape, prefix: str, parameters: str) -> list[Layout]:
    queries, keys = shape.heads * shape.head_size, shape.query_groups * shape.head_size
    tensors = []
    projections: list[tuple[str, int, Slot]] = [
        ("q_proj", queries, "query"),
        ("k_proj", keys, "key"),
        ("v_proj", keys, "value"),
    ]
    for name, size, slot in projections:
        kinds = {"weight": (size, shape.hidden)} | ({"bias": (size,)} if shape.qkv_bias else {})
        tensors += [
            Layout(f"{prefix}.{name}.{kind}", dims, (f"{parameters}.linear_qkv.{kind}",), slot, 0)
            for kind, dims in kinds.items()
        ]
    if shape.qk_norm:
        tensors += [
            Layout(
                f"{prefix}.{letter}_norm.weight",
                (shape.head_size,),
                (f"{parameters}.{letter}_layernorm.weight",),
                "whole",
            )
            for letter in "qk"
        ]
    output = (f"{parameters}.linear_proj.weight",)
    tensors.append(Layout(f"{prefix}.o_proj.weight", (shape.hidden, queries), output, "whole", 1))
    return tensors


def _mlp(
    shape: ModelShape, prefix: str, parameters: str, expert: int | None = None
) -> list[Layout]:
    wide, narrow = (shape.ffn, shape.hidden), (shape.hidden, shape.ffn)
    rows: list[tuple[str, tuple[int, int], str, Slot, int]] = [
        ("gate_proj", wide, "linear_fc1", "gate", 0),
        ("up_proj", wide, "linear_fc1", "up", 0),
        ("down_proj", narrow, "linear_fc2", "whole", 1),
    ]
    return [
        Layout(
            f"{prefix}.{name}.weight",
            size,
            (f"{parameters}.{own}.weight",),
            slot,
            split_dim,
            expert=expert,
        )
        for name, size, own, slot, split_dim in rows
    ]


def slot_view(parameter: Tensor, layout: Layout, shape: ModelShape) -> Tensor:
    """The part of a Megatron parameter, whole or sharded, that `layout`'s tensor fills.

    A view on `parameter`, for reading and writing; its elements stand in the order of the Hugging
    Face tensor's slice, but `linear_qkv` gives them the shape [query groups, rows, …].
    """
    if layout.slot in ("gate", "up"):
        return parameter.chunk(2)[0 if layout.slot == "gate" else 1]
    if layout.slot in ("query", "key", "value"):
        size = shape.head_size
        queries = shape.heads // shape.query_groups * size
        groups = parameter.view(-1, queries + 2 * size, *parameter.shape[1:])
        start, rows = {
            "query": (0, queries),
            "key": (queries, size),
            "value": (queries + size, size),
        }[layout.slot]
        return groups.narrow(1, start, rows)
    return parameter


def shard(tensor: Tensor, layout: Layout, size: int, rank: int) -> Tensor:
    """The slice of a Hugging Face tensor that tensor rank `rank` of `size` holds.

    Vocabulary rows are padded with zeros to a multiple of `size`.
    """
    if layout.split_dim is None:
        return tensor
    if layout.vocabulary:
        tensor = _pad_rows(tensor, padded_vocab_size(tensor.shape[0], size))
    return tensor.chunk(size, layout.split_dim)[rank]


def unshard(shards: Sequence[Tensor], layout: Layout) -> Tensor:
    """The Hugging Face tensor, in memory of its own, from every tensor rank's slice in order.

    Cuts the padding of a vocabulary off. A tensor that is not split is the first rank's.
    """
    if layout.split_dim is None:
        return shards[0].clone()
    whole = torch.cat(list(shards), layout.split_dim)
    return whole[: layout.shape[0]] if layout.vocabulary else whole


def padded_vocab_size(vocab_size: int, tensor_size: int) -> int:
    """The vocabulary's rows in Megatron: the next multiple of the tensor ranks."""
    return -(-vocab_size // tensor_size) * tensor_size


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def stage_layers(
    layers: int, pipeline_size: int, stage: int, virtual_size: int = 1, chunk: int = 0
) -> range:
    """The layers, numbered over the whole model, of chunk `chunk` of a pipeline stage.

    A stage of an interleaved pipeline has `virtual_size` chunks. The model runs through the first
    chunk of every stage, then through the second of every stage, and so on (megatron-core's
    interleaved schedule).
    """
    assert layers % (pipeline_size * virtual_size) == 0
    per_chunk = layers // (pipeline_size * virtual_size)
    first = (chunk * pipeline_size + stage) * per_chunk
    return range(first, first + per_chunk)


def stage_of(
    layout: Layout, layers: int, pipeline_size: int, virtual_size: int = 1
) -> tuple[int, int]:
    """The pipeline stage, and its chunk, that hold the first of `layout.parameters`.

    A tied embedding lies in the first chunk of stage 0; the last chunk of the last stage, where
    the output layer is, keeps a copy.
    """
    parameter = layout.parameters[0]
    if parameter == _EMBEDDING_PARAMETER:
        return 0, 0
    if parameter.startswith(_LAYER):
        layer = int(parameter.removeprefix(_LAYER).split(".")[0])
        place = layer // (layers // (pipeline_size * virtual_size))
        return place % pipeline_size, place // pipeline_size
    return pipeline_size - 1, virtual_size - 1


def global_name(parameter: str, first_layer: int, first_expert: int = 0) -> str:
    """A rank's parameter name, layer and expert numbered over the whole model.

    `first_layer` and `first_expert` are the numbers of the first that the rank's chunk holds.
    """
    if not parameter.startswith(_LAYER):
        return parameter
    layer, rest = parameter.removeprefix(_LAYER).split(".", 1)
    before, experts, after = rest.partition(_EXPERTS)
    if experts:
        expert, matrix = after.split(".", 1)
        rest = f"{before}{experts}{int(expert) + first_expert}.{matrix}"
    return f"{_LAYER}{int(layer) + first_layer}.{rest}"


def local_spec_name(parameter: str) -> str:
    """A parameter's name in the local layer spec.

    transformer-engine's spec keeps the norm before a linear layer inside that layer, and all
    experts of a rank in one layer, with a weight for each.
    """
    parameter = parameter.replace(
        "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"
    ).replace("mlp.linear_fc1.layer_norm_weight", f"{_MLP_NORM}.weight")
    return _GROUPED.sub(rf"{_EXPERTS}\2.\1.weight", parameter)
