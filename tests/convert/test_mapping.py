"""Names and layouts, against transformers' own state dict and against hand-written orders."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_gmc.convert.hf_config import ModelShape, load_shape, parse_shape
from megatron_gmc.convert.hugging_face import tensor_shapes
from megatron_gmc.convert.mapping import (
    Layout,
    global_name,
    layouts,
    local_spec_name,
    padded_vocab_size,
    shard,
    slot_view,
    stage_layers,
    stage_of,
    unshard,
)
from tests.models import FAMILIES, save_tiny_model, tiny_model
from tests.qwen3 import LAYERS, VOCABULARY, tiny_qwen3


def shape_of(tied: bool) -> ModelShape:
    tree = tiny_qwen3(tied).config.to_dict()
    return parse_shape({**tree, "architectures": ["Qwen3ForCausalLM"]})


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return shape_of(tied=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_those_of_transformers(
    tmp_path: Path, family: str, tied: bool
) -> None:
    """C6: what save_pretrained writes, one tensor for each matrix of each expert."""
    folder = save_tiny_model(tmp_path / "model", family, tied)
    expected = dict(tensor_shapes(folder))
    found = {name: layout.shape for name, layout in layouts(load_shape(folder)).items()}
    assert found == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_filled_once(tmp_path: Path, family: str) -> None:
    """Slots cover each Megatron parameter without gap or overlap."""
    shape = load_shape(save_tiny_model(tmp_path / "model", family, tied=False))
    filled: dict[str, int] = {}
    for layout in layouts(shape).values():
        (parameter,) = layout.parameters
        filled[parameter] = filled.get(parameter, 0) + math.prod(layout.shape)
    heads, groups, size = shape.heads, shape.query_groups, shape.head_size
    qkv = (heads + 2 * groups) * size
    prefix = "decoder.layers.5."
    assert filled[prefix + "self_attention.linear_qkv.weight"] == qkv * shape.hidden
    assert filled.get(prefix + "self_attention.linear_qkv.bias", 0) == qkv * shape.qkv_bias
    experts = [f"mlp.experts.local_experts.{e}" for e in range(shape.experts)] or ["mlp"]
    for mlp in experts:
        assert filled[f"{prefix}{mlp}.linear_fc1.weight"] == 2 * shape.ffn * shape.hidden


def rows(label: int, heads: int, size: int) -> Tensor:
    """Rows that say which head they belong to: label + head + row / 100."""
    return torch.tensor([[label + h + r / 100] for h in range(heads) for r in range(size)])


def test_qkv_stacks_each_group_with_its_keys_and_values(shape: ModelShape) -> None:
    """C3: 8 heads in 4 groups. Group g holds query heads 2g and 2g+1, key g, value g."""
    size, layer = shape.head_size, layouts(shape)
    parts = {"q": rows(100, 8, size), "k": rows(200, 4, size), "v": rows(300, 4, size)}
    parameter = torch.empty(16 * size, 1)
    for letter, tensor in parts.items():
        slot = slot_view(parameter, layer[f"model.layers.0.self_attn.{letter}_proj.weight"], shape)
        slot.copy_(tensor.view(slot.shape))
    heads = [round(float(row)) for row in parameter[::size, 0]]
    assert heads == [
        *(100, 101, 200, 300),
        *(102, 103, 201, 301),
        *(104, 105, 202, 302),
        *(106, 107, 203, 303),
    ]


def test_biases_stack_as_the_rows_do(tmp_path: Path) -> None:
    """Qwen2's, 1-D: transformers' own biases in Megatron's order, two groups to a tensor rank."""
    model = tiny_model("qwen2", tied=True)
    state = {name: tensor for name, tensor in model.named_parameters() if "bias" in name}
    model.save_pretrained(tmp_path / "model")
    shape = load_shape(tmp_path / "model")
    size, layer = shape.head_size, layouts(shape)
    prefix = "model.layers.0.self_attn"
    for rank in range(2):
        parameter = torch.empty(8 * size)
        for letter in "qkv":
            layout = layer[f"{prefix}.{letter}_proj.bias"]
            slot = slot_view(parameter, layout, shape)
            slot.copy_(shard(state[layout.name], layout, 2, rank).view(slot.shape))
        q, k, v = (state[f"{prefix}.{letter}_proj.bias"].split(size) for letter in "qkv")
        expected = [
            part
            for group in (2 * rank, 2 * rank + 1)
            for part in (q[2 * group], q[2 * group + 1], k[group], v[group])
        ]
        assert torch.equal(parameter, torch.cat(expected))


def test_a_tensor_rank_holds_its_half_of_gate_and_of_up(shape: ModelShape) -> None:
    layer = layouts(shape)
    gate, up = (torch.arange(48.0).view(48, 1) + offset for offset in (0, 1000))
    for rank, start in ((0, 0), (1, 24)):
        parameter = torch.empty(48, 1)  # half of the 96 rows of gate and up
        for name, tensor in (("gate", gate), ("up", up)):
            layout = layer[f"model.layers.0.mlp.{name}_proj.weight"]
            slot_view(parameter, layout, shape).copy_(shard(tensor, layout, 2, rank))
        expected = [*range(start, start + 24), *range(1000 + start, 1000 + start + 24)]
        assert parameter.flatten().tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_join_to_the_tensor(shape: ModelShape, size: int) -> None:
    """C2, in its pure part: 101 rows of vocabulary come back as 101."""
    state = tiny_qwen3(tied=False).state_dict()
    for name, layout in layouts(shape).items():
        shards = [shard(state[name], layout, size, rank) for rank in range(size)]
        assert len({tuple(s.shape) for s in shards}) == 1
        whole = unshard(shards, layout)
        assert torch.equal(whole, state[name]), name
        assert whole.data_ptr() != state[name].data_ptr(), name


def test_padding_of_the_vocabulary_is_zero_and_at_the_end(shape: ModelShape) -> None:
    layout = layouts(shape)["lm_head.weight"]
    last = shard(torch.ones(VOCABULARY, 32), layout, 4, 3)
    assert last.shape == (26, 32)
    assert last.sum(1).tolist() == [32.0] * 23 + [0.0] * 3


@pytest.mark.parametrize(
    ("vocabulary", "ranks", "rows"), [(101, 1, 101), (101, 2, 102), (101, 4, 104), (128, 4, 128)]
)
def test_padded_vocabulary(vocabulary: int, ranks: int, rows: int) -> None:
    assert padded_vocab_size(vocabulary, ranks) == rows


@pytest.mark.parametrize(("stages", "second"), [(2, range(3, 6)), (3, range(2, 4))])
def test_layers_of_a_stage(stages: int, second: range) -> None:
    assert stage_layers(LAYERS, stages, 1) == second


def test_layers_of_interleaved_stages() -> None:
    """8 layers on 2 stages of 2 chunks, as megatron-core's documentation of the schedule has it:
    stage 0 holds layers 1, 2 and 5, 6, stage 1 holds 3, 4 and 7, 8 (counted from 1)."""
    held = [[list(stage_layers(8, 2, stage, 2, chunk)) for chunk in (0, 1)] for stage in (0, 1)]
    assert held == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("stages", "chunks"), [(3, 1), (3, 2), (2, 3), (1, 1)])
def test_the_stage_of_a_tensor_holds_its_parameter(tied: bool, stages: int, chunks: int) -> None:
    """C1: the embedding first, norm and output layer last, tied or not."""
    of: dict[str, Layout] = layouts(shape_of(tied))
    places = {name: stage_of(layout, LAYERS, stages, chunks) for name, layout in of.items()}
    assert places["model.embed_tokens.weight"] == (0, 0)
    assert places["model.norm.weight"] == (stages - 1, chunks - 1)
    assert tied or places["lm_head.weight"] == (stages - 1, chunks - 1)
    for layer in range(LAYERS):
        stage, chunk = places[f"model.layers.{layer}.mlp.up_proj.weight"]
        assert layer in stage_layers(LAYERS, stages, stage, chunks, chunk)


def test_layer_numbers_of_a_stage_become_those_of_the_model() -> None:
    assert (
        global_name("decoder.layers.1.mlp.linear_fc2.weight", 4)
        == "decoder.layers.5.mlp.linear_fc2.weight"
    )
    assert global_name("output_layer.weight", 4) == "output_layer.weight"
    expert = "mlp.experts.local_experts.{}.linear_fc1.weight"
    assert global_name(
        "decoder.layers.1." + expert.format(0), 4, first_expert=2
    ) == "decoder.layers.5." + expert.format(2)


def test_names_of_transformer_engine() -> None:
    """Its layers keep the norm inside the linear layer that follows it (megatron-core's spec)."""
    prefix = "decoder.layers.0."
    assert (
        local_spec_name(prefix + "self_attention.linear_qkv.layer_norm_weight")
        == prefix + "input_layernorm.weight"
    )
    assert (
        local_spec_name(prefix + "mlp.linear_fc1.layer_norm_weight")
        == prefix + "pre_mlp_layernorm.weight"
    )
    assert (
        local_spec_name(prefix + "mlp.experts.linear_fc2.weight11")
        == prefix + "mlp.experts.local_experts.11.linear_fc2.weight"
    )
    for unchanged in ("self_attention.linear_qkv.weight", "mlp.router.weight"):
        assert local_spec_name(prefix + unchanged) == prefix + unchanged
