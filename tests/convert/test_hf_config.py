"""config.json becomes a shape, or is refused by the field that cannot be honoured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_gmc.convert.hf_config import ModelShape, load_shape, parse_shape
from tests.qwen3 import save_tiny_qwen3

# As published for Qwen3-0.6B, written by transformers 4.
QWEN3_06B: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

SHAPE_06B = ModelShape(
    layers=28,
    hidden=1024,
    ffn=3072,
    heads=16,
    query_groups=8,
    head_size=128,
    vocab_size=151936,
    max_positions=40960,
    norm_epsilon=1e-6,
    rope_theta=1e6,
    tied=True,
    initializer_range=0.02,
)


def test_a_published_config_of_transformers_4() -> None:
    assert parse_shape(QWEN3_06B) == SHAPE_06B


def test_the_same_as_transformers_5_writes_it() -> None:
    tree = {k: v for k, v in QWEN3_06B.items() if k not in ("rope_theta", "rope_scaling")}
    tree["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000}
    assert parse_shape(tree) == SHAPE_06B


def test_a_folder_that_transformers_saved(tmp_path: Path) -> None:
    shape = load_shape(save_tiny_qwen3(tmp_path / "model", tied=False))
    assert (shape.heads, shape.query_groups, shape.head_size, shape.tied) == (8, 4, 16, False)
    assert shape.rope_theta == 10_000.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["LlamaForCausalLM"]),
        ("architectures", None),
        ("model_type", "qwen2"),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e6, "factor": 8.0}),
        ("rope_parameters", "default"),
        ("rope_theta", 0),
        ("rope_theta", None),
        ("quantization_config", {"bits": 4}),
        ("auto_map", {"AutoModel": "modeling.Mine"}),
        ("num_experts", 8),
        ("hidden_size", 0),
        ("hidden_size", "1024"),
        ("vocab_size", None),
        ("head_dim", 63),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", -1e-6),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_what_changes_the_maths_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field}"):
        parse_shape({**QWEN3_06B, field: value})


def test_two_different_rope_thetas_are_refused() -> None:
    tree = {**QWEN3_06B, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}}
    with pytest.raises(ValueError, match="rope_theta: given twice"):
        parse_shape(tree)


def test_a_missing_field_is_named() -> None:
    tree = {k: v for k, v in QWEN3_06B.items() if k != "rope_theta"}
    with pytest.raises(ValueError, match="rope_theta: missing"):
        parse_shape(tree)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json; give the folder"):
        load_shape(tmp_path)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_shape(tmp_path / "nowhere")


@pytest.mark.parametrize(("text", "fault"), [('{"a": ', "is not JSON"), ("[1]", "no mapping")])
def test_a_broken_config(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"config.json {fault}|config.json holds {fault}"):
        load_shape(tmp_path)


def test_the_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_06B, "hidden_act": "gelu"}))
    with pytest.raises(ValueError, match=r"config\.json: hidden_act: 'gelu'"):
        load_shape(tmp_path)
