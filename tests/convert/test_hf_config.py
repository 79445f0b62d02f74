"""config.json becomes a shape, or is refused by the field that cannot be honoured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_gmc.convert.hf_config import ModelShape, load_shape, parse_shape
from tests.models import FAMILIES, save_tiny_model
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

# As published for Qwen2.5-0.5B.
QWEN25_05B: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

# With the numbers of Llama-3.2-1B.
LLAMA3_ROPE: dict[str, object] = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA32_1B: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_ROPE,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}

# With the numbers of Qwen3-30B-A3B.
QWEN3_30B: dict[str, object] = {
    **QWEN3_06B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}


def test_published_qwen25() -> None:
    """Heads of hidden / heads; biases on q, k and v, and no norms there."""
    shape = parse_shape(QWEN25_05B)
    assert (shape.head_size, shape.qkv_bias, shape.qk_norm) == (64, True, False)
    assert (shape.experts, shape.rope_factor, shape.tied) == (0, None, True)
    assert parse_shape({**QWEN25_05B, "head_dim": 128}).head_size == 128


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_published_llama3(key: str) -> None:
    """The scaling as transformers 4 and as transformers 5 write it."""
    tree = {k: v for k, v in LLAMA32_1B.items() if not k.startswith("rope_")}
    shape = parse_shape({**tree, key: {**LLAMA3_ROPE, "rope_theta": 500000.0}})
    assert shape == parse_shape(LLAMA32_1B)
    assert (shape.head_size, shape.qkv_bias, shape.qk_norm) == (64, False, False)
    assert (shape.rope_theta, shape.rope_factor) == (500_000.0, 32.0)


def test_llama_without_scaling() -> None:
    """As SmolLM2: no scaling, and fields that transformers does not read."""
    tree = {
        **LLAMA32_1B,
        "rope_scaling": None,
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
    }
    del tree["head_dim"]
    shape = parse_shape(tree)
    assert (shape.rope_factor, shape.head_size) == (None, 64)


def test_published_qwen3_mixture() -> None:
    shape = parse_shape(QWEN3_30B)
    assert (shape.experts, shape.experts_per_token, shape.normalised_gates) == (128, 8, True)
    assert (shape.ffn, shape.qk_norm, shape.head_size) == (768, True, 128)


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_that_transformers_saved(tmp_path: Path, family: str) -> None:
    shape = load_shape(save_tiny_model(tmp_path / "model", family, tied=False))
    assert (shape.heads, shape.query_groups, shape.tied) == (8, 4, False)
    assert shape.qkv_bias == (family == "qwen2")
    assert shape.qk_norm == family.startswith("qwen3")
    assert shape.rope_factor == (32.0 if family == "llama3" else None)
    assert shape.experts == (4 if "moe" in family else 0)
    assert shape.normalised_gates == (family == "qwen3_moe")


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
        ("architectures", ["Gemma3ForCausalLM"]),
        ("architectures", ["Qwen3ForCausalLM", "LlamaForCausalLM"]),
        ("architectures", None),
        ("rope_scaling", LLAMA3_ROPE),
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


@pytest.mark.parametrize(
    ("config", "field", "value", "named"),
    [
        (QWEN25_05B, "use_mrope", True, "use_mrope"),
        (QWEN25_05B, "use_sliding_window", True, "use_sliding_window"),
        (QWEN25_05B, "head_dim", 63, "head_dim"),
        (QWEN25_05B, "num_attention_heads", 15, "num_attention_heads"),
        (QWEN25_05B, "mlp_bias", False, "mlp_bias"),
        (LLAMA32_1B, "attention_bias", True, "attention_bias"),
        (LLAMA32_1B, "mlp_bias", True, "mlp_bias"),
        (LLAMA32_1B, "pretraining_tp", 2, "pretraining_tp"),
        (LLAMA32_1B, "rope_interleaved", True, "rope_interleaved"),
        (LLAMA32_1B, "sliding_window", 4096, "sliding_window"),
        (LLAMA32_1B, "rope_scaling", LLAMA3_ROPE | {"low_freq_factor": 2.0}, "rope_scaling.low"),
        (LLAMA32_1B, "rope_scaling", LLAMA3_ROPE | {"high_freq_factor": 8}, "rope_scaling.high"),
        (
            LLAMA32_1B,
            "rope_scaling",
            LLAMA3_ROPE | {"original_max_position_embeddings": 4096},
            "rope_scaling.original_max_position_embeddings: 4096 .* with 8192",
        ),
        (LLAMA32_1B, "rope_scaling", LLAMA3_ROPE | {"factor": 0}, "rope_scaling.factor: 0"),
        (LLAMA32_1B, "rope_scaling", LLAMA3_ROPE | {"attention_factor": 2}, "rope_scaling.att"),
        (LLAMA32_1B, "rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_scaling"),
        (LLAMA32_1B, "rope_parameters", LLAMA3_ROPE | {"factor": 8.0}, "rope_scaling"),
        (QWEN3_30B, "decoder_sparse_step", 2, "decoder_sparse_step"),
        (QWEN3_30B, "mlp_only_layers", [0], "mlp_only_layers"),
        (QWEN3_30B, "num_experts_per_tok", 129, "num_experts_per_tok: 129"),
        (QWEN3_30B, "num_experts_per_tok", 1, "norm_topk_prob: true"),
        (QWEN3_30B, "num_local_experts", 64, "num_experts: given twice"),
        (QWEN3_30B, "moe_intermediate_size", None, "moe_intermediate_size: missing"),
        (QWEN3_30B, "norm_topk_prob", None, "norm_topk_prob: missing"),
        (QWEN3_30B, "shared_expert_intermediate_size", 64, "shared_expert_intermediate_size"),
    ],
)
def test_what_changes_the_maths_of_other_families_is_refused_by_name(
    config: dict[str, object], field: str, value: object, named: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{named}"):
        parse_shape({**config, field: value})


def test_mlp_only_layers_may_be_null() -> None:
    """Which transformers reads as none."""
    assert parse_shape({**QWEN3_30B, "mlp_only_layers": None}) == parse_shape(QWEN3_30B)


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
