"""The architectures of transformers that the learner knows, and the fields of their config.json.

Every field is accounted for: read, required to have the one value under which it changes nothing,
or known not to touch the maths. Any other is refused by name, since a field that we ignore and
transformers heeds would part the two models without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_gmc.convert.fields import JsonTree


@dataclass(frozen=True)
class Family:
    """What one architecture computes beyond RMSNorm, SwiGLU, grouped queries and RoPE."""

    model_type: str
    required: Mapping[str, object]
    """Fields with the one value that is supported, which is also the one that a missing field
    stands for."""
    read: frozenset[str] = frozenset()
    """Fields that are read for this family alone."""
    ignored: frozenset[str] = frozenset()
    """Fields that this family's files carry and that do not change what the model computes."""
    qkv_bias: bool = False
    qk_norm: bool = False
    mixture: bool = False
    """Whether every layer's MLP is a mixture of experts."""
    llama3_rope: bool = False


_READ = frozenset(
    {
        "architectures",
        "hidden_size",
        "initializer_range",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "vocab_size",
    }
)

_REQUIRED: Mapping[str, object] = {
    "hidden_act": "silu",
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

_WINDOW = frozenset({"layer_types", "sliding_window", "use_sliding_window"})

FAMILIES: Mapping[str, Family] = {
    "Qwen3ForCausalLM": Family(
        "qwen3",
        {"attention_bias": False},
        read=_WINDOW | {"head_dim", "intermediate_size"},
        ignored=frozenset({"max_window_layers"}),
        qk_norm=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        # Layers with a plain MLP between the mixtures would need a layer spec of their own.
        {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        read=_WINDOW
        | {
            "head_dim",
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
        },
        # The auxiliary loss is not part of the policy; no layer has a plain MLP.
        ignored=frozenset(
            {
                "intermediate_size",
                "max_window_layers",
                "output_router_logits",
                "router_aux_loss_coef",
            }
        ),
        qk_norm=True,
        mixture=True,
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        {"use_mrope": False},
        read=_WINDOW | {"head_dim", "intermediate_size"},
        ignored=frozenset({"max_window_layers"}),
        qkv_bias=True,
    ),
    "LlamaForCausalLM": Family(
        "llama",
        {
            "attention_bias": False,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rope_interleaved": False,
        },
        read=frozenset({"head_dim", "intermediate_size"}),
        ignored=frozenset({"is_llama_config", "transformers.js_config"}),
        llama3_rope=True,
    ),
}


def family_of(tree: JsonTree) -> Family:
    """The family of a parsed config.json, all its fields known.

    Raises ValueError, starting with the field's name, for another architecture, an unknown field,
    and a value under which transformers computes something else.
    """
    architectures = tree.get("architectures")
    family = None
    if isinstance(architectures, list) and len(architectures) == 1:
        family = FAMILIES.get(str(architectures[0]))
    if family is None:
        known = ", ".join(FAMILIES)
        raise ValueError(f"architectures: {architectures}; supported is one of {known}")
    required = {**_REQUIRED, "model_type": family.model_type, **family.required}
    for key, value in required.items():
        given = tree.get(key, value)
        # transformers reads a null list as an empty one.
        if given != value and not (given is None and value == []):
            raise ValueError(f"{key}: {given!r} is not supported; it must be {value!r}")
    unknown = sorted(set(tree) - _READ - family.read - set(required) - family.ignored - _NO_MATHS)
    if unknown:
        raise ValueError(f"{unknown[0]}: unknown field, which may change what the model computes")
    return family
