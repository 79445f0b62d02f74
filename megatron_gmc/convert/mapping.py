"""Where each Hugging Face tensor of a Qwen3 model lies in megatron-core's GPTModel.

Pure names and layouts, no process groups. Names are those of megatron-core's local layer spec;
`local_spec_name` brings transformer-engine's names to them.

Two Megatron parameters hold several Hugging Face tensors. `linear_qkv` stacks, query group by
query group, the group's query heads, its key head and its value head; `linear_fc1` stacks gate and
up projection. A *slot* is the part of a parameter that one tensor fills. Tensor parallelism cuts
both parameters so that a rank's slot is the rank's slice of the Hugging Face tensor, so one
description serves whole and sharded parameters.
"""

from __future__ import annotations

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
    split_dim: int | None
    """The dimension that tensor parallelism cuts; None where every rank holds the tensor."""
    vocabulary: bool = False
    """Whether its rows are the vocabulary, which is padded to a multiple of the tensor ranks."""


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
            None,
        )
    )
    if not shape.tied:
        tensors.append(Layout(OUTPUT, vocabulary, (_OUTPUT_PARAMETER,), "whole", 0, True))
    return {tensor.name: tensor for tensor in tensors}


def _layer(shape: ModelShape, layer: int) -> list[Layout]:
    hidden, ffn = shape.hidden, shape.ffn
    queries, keys = shape.heads * shape.head_size, shape.query_groups * shape.head_size
    qkv, fc1 = "self_attention.linear_qkv", "mlp.linear_fc1"
    rows: list[tuple[str, tuple[int, ...], str, Slot, int | None]] = [
        ("input_layernorm", (hidden,), "input_layernorm", "whole", None),
        ("self_attn.q_proj", (queries, hidden), qkv, "query", 0),
        ("self_attn.k_proj", (keys, hidden), qkv, "key", 0),
        ("self_attn.v_proj", (keys, hidden), qkv, "value", 0),
        ("self_attn.q_norm", (shape.head_size,), "self_attention.q_layernorm", "whole", None),
        ("self_attn.k_norm", (shape.head_size,), "self_attention.k_layernorm", "whole", None),
        ("self_attn.o_proj", (hidden, queries), "self_attention.linear_proj", "whole", 1),
        ("post_attention_layernorm", (hidden,), "pre_mlp_layernorm", "whole", None),
        ("mlp.gate_proj", (ffn, hidden), fc1, "gate", 0),
        ("mlp.up_proj", (ffn, hidden), fc1, "up", 0),
        ("mlp.down_proj", (hidden, ffn), "mlp.linear_fc2", "whole", 1),
    ]
    return [
        Layout(
            f"model.layers.{layer}.{name}.weight",
            size,
            (f"{_LAYER}{layer}.{parameter}.weight",),
            slot,
            split_dim,
        )
        for name, size, parameter, slot, split_dim in rows
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


def stage_layers(layers: int, pipeline_size: int, stage: int) -> range:
    """The layers, numbered over the whole model, that a pipeline stage holds."""
    assert layers % pipeline_size == 0
    per_stage = layers // pipeline_size
    return range(stage * per_stage, (stage + 1) * per_stage)


def stage_of(layout: Layout, layers: int, pipeline_size: int) -> int:
    """The pipeline stage that holds the first of `layout.parameters`."""
    parameter = layout.parameters[0]
    if parameter == _EMBEDDING_PARAMETER:
        return 0
    if parameter.startswith(_LAYER):
        layer = int(parameter.removeprefix(_LAYER).split(".")[0])
        return layer // (layers // pipeline_size)
    return pipeline_size - 1


def global_name(parameter: str, first_layer: int) -> str:
    """A stage's parameter name with its layer numbered over the whole model."""
    if not parameter.startswith(_LAYER):
        return parameter
    layer, rest = parameter.removeprefix(_LAYER).split(".", 1)
    return f"{_LAYER}{int(layer) + first_layer}.{rest}"


def local_spec_name(parameter: str) -> str:
    """A parameter's name in the local layer spec.

    transformer-engine's spec keeps the norm before a linear layer inside that layer.
    """
    return parameter.replace(
        "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"
    ).replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
