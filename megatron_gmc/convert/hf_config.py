"""The shape of a policy, read from the config.json of a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_gmc.convert.families import Family, family_of
from megatron_gmc.convert.fields import JsonTree, count, flag, positive
from megatron_gmc.convert.rope import read_rope


@dataclass(frozen=True)
class ModelShape:
    """The numbers that fix a decoder of RMSNorm, SwiGLU, grouped queries and RoPE.

    Widths are in elements; `max_positions` is in tokens.
    """

    layers: int
    hidden: int
    ffn: int
    """Width of the MLP, or of one expert, between its gate and its down projection."""
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
    qk_norm: bool = True
    """Whether queries and keys are normed head by head."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values add a bias."""
    rope_factor: float | None = None
    """By how much Llama 3's scaling stretches long rotary wavelengths; None without scaling."""
    experts: int = 0
    """Experts in every layer's MLP; 0 where the MLP is a plain one."""
    experts_per_token: int = 0
    """To how many experts a token goes."""
    normalised_gates: bool = False
    """Whether the gates of a token's experts are divided by their sum."""


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
    family = family_of(tree)
    _check_full_attention(tree)
    hidden, heads = count(tree, "hidden_size"), count(tree, "num_attention_heads")
    theta, factor = read_rope(tree, llama3=family.llama3_rope)
    mixture = _Mixture.read(tree) if family.mixture else _Mixture()
    shape = ModelShape(
        layers=count(tree, "num_hidden_layers"),
        hidden=hidden,
        ffn=count(tree, "moe_intermediate_size" if family.mixture else "intermediate_size"),
        heads=heads,
        query_groups=count(tree, "num_key_value_heads"),
        head_size=_head_size(tree, family, hidden, heads),
        vocab_size=count(tree, "vocab_size"),
        max_positions=count(tree, "max_position_embeddings"),
        norm_epsilon=positive(tree, "rms_norm_eps"),
        rope_theta=theta,
        tied=flag(tree, "tie_word_embeddings"),
        initializer_range=positive(tree, "initializer_range"),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        rope_factor=factor,
        experts=mixture.experts,
        experts_per_token=mixture.per_token,
        normalised_gates=mixture.normalised_gates,
    )
    if shape.heads % shape.query_groups:
        raise ValueError(
            f"num_key_value_heads: {shape.query_groups} does not divide num_attention_heads "
            f"{shape.heads}"
        )
    if shape.head_size % 2:
        raise ValueError(f"head_dim: {shape.head_size} is odd; rotary embedding needs pairs")
    return shape


@dataclass(frozen=True)
class _Mixture:
    experts: int = 0
    per_token: int = 0
    normalised_gates: bool = False

    @classmethod
    def read(cls, tree: JsonTree) -> _Mixture:
        # transformers 5 writes num_local_experts where earlier ones wrote num_experts.
        names = [key for key in ("num_experts", "num_local_experts") if key in tree]
        sizes = {key: count(tree, key) for key in names or ("num_experts",)}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"num_experts: given twice and differently, {sizes}")
        experts, per_token = next(iter(sizes.values())), count(tree, "num_experts_per_tok")
        if per_token > experts:
            raise ValueError(f"num_experts_per_tok: {per_token} is more than the {experts} experts")
        normalised = flag(tree, "norm_topk_prob")
        if normalised and per_token == 1:
            raise ValueError(
                "norm_topk_prob: true with num_experts_per_tok 1; every gate would be 1 and the "
                "router would never learn"
            )
        return cls(experts, per_token, normalised)


def _head_size(tree: JsonTree, family: Family, hidden: int, heads: int) -> int:
    """`head_dim`, or hidden / heads without it, as transformers has it."""
    # Without it, transformers would give Qwen3 heads of 128 whatever the widths are.
    if tree.get("head_dim") is not None or family.model_type == "qwen3":
        return count(tree, "head_dim")
    if hidden % heads:
        raise ValueError(f"num_attention_heads: {heads} does not divide hidden_size {hidden}")
    return hidden // heads


def _check_full_attention(tree: JsonTree) -> None:
    if tree.get("use_sliding_window", False):
        raise ValueError(
            f"use_sliding_window: {tree['use_sliding_window']!r} with sliding_window "
            f"{tree.get('sliding_window')!r}; only full attention is supported"
        )
    types = tree.get("layer_types") or []
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise ValueError(f"layer_types: {types!r}; only 'full_attention' is supported")
