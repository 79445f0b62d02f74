"""Experts that transformers stacks in memory are those that it writes one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_gmc.convert.experts import separated
from megatron_gmc.convert.hf_config import ModelShape, load_shape
from megatron_gmc.convert.hugging_face import stream_tensors, tensor_shapes
from megatron_gmc.convert.inventory import check_tensors
from tests.models import save_tiny_model, tiny_model

STACKS = ("model.layers.2.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("mixture") / "model", "qwen3_moe", tied=False)


@pytest.fixture(scope="module")
def shape(folder: Path) -> ModelShape:
    return load_shape(folder)


def in_memory() -> dict[str, Tensor]:
    return dict(tiny_model("qwen3_moe", tied=False).named_parameters())


def test_a_state_dict_comes_apart_into_what_save_pretrained_writes(
    folder: Path, shape: ModelShape
) -> None:
    """C6: names, count and every number."""
    assert set(STACKS) <= in_memory().keys()
    apart = {n: t for pair in in_memory().items() for n, t in separated(*pair, shape)}
    written = dict(stream_tensors(folder))
    assert apart.keys() == written.keys()
    assert all(torch.equal(apart[name], written[name]) for name in written)


def test_both_forms_pass_the_inventory(folder: Path, shape: ModelShape) -> None:
    check_tensors(tensor_shapes(folder), shape)
    check_tensors(((name, tuple(t.shape)) for name, t in in_memory().items()), shape)


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_of_another_shape_is_named(shape: ModelShape, name: str) -> None:
    sizes = {n: tuple(t.shape) for n, t in in_memory().items()}
    sizes[name] = (3, *sizes[name][1:])
    with pytest.raises(ValueError, match=rf"^tensor {name}: its shape is \(3, .* be \(4, "):
        check_tensors(sizes.items(), shape)


def test_an_expert_too_many_is_named(folder: Path, shape: ModelShape) -> None:
    name = "model.layers.0.mlp.experts.4.up_proj.weight"
    with pytest.raises(ValueError, match=rf"^tensor {name}: not part of the model"):
        check_tensors([(name, (24, 32)), *tensor_shapes(folder)], shape)


def test_a_missing_expert_is_named(folder: Path, shape: ModelShape) -> None:
    gone = "model.layers.3.mlp.experts.1.down_proj.weight"
    found = [(name, size) for name, size in tensor_shapes(folder) if name != gone]
    with pytest.raises(ValueError, match=rf"1 of the model's tensors are missing, first {gone}"):
        check_tensors(found, shape)
