"""The shape of a policy, read from the config.json of a Hugging Face folder.

Every key of config.json is accounted for: read, required to have the one value under which it
changes nothing, or known not to touch the maths. Anything else is refused by name, since a key
that we ignore and transformers heeds would part the two models without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

JsonTree = Mapping[str, object]

_ARCHITECTURE = "Qwen3ForCausalLM"

_READ = frozenset(
    {
        "architectures",
        "head_dim",
        "hidden_size",
        "initializer_range",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    }
)

_REQUIRED_VALUE: Mapping[str, object] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
}

# Bookkeeping of transformers, generation and training set-ups.
_NO_MATHS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "label2id",
        "max_window_layers",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "prefix",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "use_return_dict",
    }
)

_ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta"})


@dataclass(frozen=True)
class ModelShape:
    """The numbers that fix a Qwen3 model: RMSNorm, SwiGLU, grouped queries, normed q and k, RoPE.

    Widths are in elements; `max_positions` is in tokens.
    """

    layers: int
    hidden: int
    ffn: int
    """Width of the MLP between its gate and its down projection."""
    heads: int
    query_groups: int
    """Key and value heads; each serves heads / query_groups query heads."""
    head_size: int
    """Not always hidden / heads."""
    vocab_size: int
    """Rows of the embedding, without any padding."""
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    tied: bool
    """Whether the output layer shares the embedding's weight."""
    initializer_range: float
    """Standard deviation of freshly drawn weights."""


def load_shape(folder: Path) -> ModelShape:
    """Read `folder`/config.json.

    Raises ValueError where the folder holds none, or one that describes another architecture or
    other maths than the learner computes.
    """
    path = folder / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"{folder} is no Hugging Face model: it has no config.json; give the folder that "
            "holds config.json, the tokenizer and *.safetensors"
        ) from None
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds no mapping of fields")
    try:
        return parse_shape(tree)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_shape(tree: JsonTree) -> ModelShape:
    """The shape that a config.json describes, once parsed; raises ValueError as `load_shape`."""
    architectures = tree.get("architectures")
    if architectures != [_ARCHITECTURE]:
        raise ValueError(f"architectures: {architectures}; supported is ['{_ARCHITECTURE}']")
    for key, required in _REQUIRED_VALUE.items():
        if tree.get(key, required) != required:
            raise ValueError(f"{key}: {tree[key]!r} is not supported; it must be {required!r}")
    unknown = sorted(set(tree) - _READ - set(_REQUIRED_VALUE) - _NO_MATHS)
    if unknown:
        raise ValueError(f"{unknown[0]}: unknown field, which may change what the model computes")
    _check_full_attention(tree)
    shape = ModelShape(
        layers=_count(tree, "num_hidden_layers"),
        hidden=_count(tree, "hidden_size"),
        ffn=_count(tree, "intermediate_size"),
        heads=_count(tree, "num_attention_heads"),
        query_groups=_count(tree, "num_key_value_heads"),
        head_size=_count(tree, "head_dim"),
        vocab_size=_count(tree, "vocab_size"),
        max_positions=_count(tree, "max_position_embeddings"),
        norm_epsilon=_positive(tree, "rms_norm_eps"),
        rope_theta=_rope_theta(tree),
        tied=_flag(tree, "tie_word_embeddings"),
        initializer_range=_positive(tree, "initializer_range"),
    )
    if shape.heads % shape.query_groups:
        raise ValueError(
            f"num_key_value_heads: {shape.query_groups} does not divide num_attention_heads "
            f"{shape.heads}"
        )
    if shape.head_size % 2:
        raise ValueError(f"head_dim: {shape.head_size} is odd; rotary embedding needs pairs")
    return shape


def _check_full_attention(tree: JsonTree) -> None:
    if tree.get("use_sliding_window", False):
        raise ValueError(
            f"use_sliding_window: {tree['use_sliding_window']!r} with sliding_window "
            f"{tree.get('sliding_window')!r}; only full attention is supported"
        )
    types = tree.get("layer_types") or []
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise ValueError(f"layer_types: {types!r}; only 'full_attention' is supported")


def _rope_theta(tree: JsonTree) -> float:
    """`rope_parameters` is how transformers 5 writes it; `rope_theta` and `rope_scaling` before."""
    sources = {}
    for key in ("rope_parameters", "rope_scaling"):
        parameters = tree.get(key)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            raise ValueError(f"{key}: {parameters!r} is no mapping")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default" or set(parameters) - _ROPE_KEYS:
            raise ValueError(f"{key}: {parameters!r} is not supported; rope_type must be 'default'")
        if "rope_theta" in parameters:
            sources[f"{key}.rope_theta"] = _positive(parameters, "rope_theta")
    if "rope_theta" in tree:
        sources["rope_theta"] = _positive(tree, "rope_theta")
    if not sources:
        raise ValueError("rope_theta: missing, both at the top and in rope_parameters")
    if len(set(sources.values())) > 1:
        raise ValueError(f"rope_theta: given twice and differently, {sources}")
    return next(iter(sources.values()))


def _field(tree: JsonTree, key: str) -> object:
    if tree.get(key) is None:
        raise ValueError(f"{key}: missing")
    return tree[key]


def _count(tree: JsonTree, key: str) -> int:
    value = _field(tree, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: {value!r} must be a whole number above 0")
    return value


def _positive(tree: JsonTree, key: str) -> float:
    value = _field(tree, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{key}: {value!r} must be a number above 0")
    return float(value)


def _flag(tree: JsonTree, key: str) -> bool:
    value = _field(tree, key)
    if not isinstance(value, bool):
        raise ValueError(f"{key}: {value!r} must be true or false")
    return value
