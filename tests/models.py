"""Small models of transformers, one of each family that the learner knows.

The reference that conversion and learner are held to. Each has query groups, weights away from
where they would be drawn, and something that its family alone has: see `CONFIGS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 101  # prime, so that no number of tensor ranks divides it
LAYERS = 6

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_MIXTURE = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}

# Family → transformers' config class, model class, and what is its own.
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    # As SmolLM2: Llama without rope scaling.
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    # Heads of 16, so that there are wavelengths of every kind: kept, stretched and between.
    "llama3": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"head_dim": 16, "max_position_embeddings": 131_072, "rope_parameters": _LLAMA3_ROPE},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _MIXTURE | {"norm_topk_prob": True},
    ),
    # The gates of a token's experts as they come, so that they add up to less than 1.
    "qwen3_moe_plain_gates": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _MIXTURE | {"norm_topk_prob": False},
    ),
}
FAMILIES = tuple(CONFIGS)


def tiny_model(family: str, tied: bool, seed: int = 0, layers: int = LAYERS) -> PreTrainedModel:
    """A model of `family` whose norms and biases are drawn as well."""
    # Ranks that need the sizes alone are spared the seconds that this import takes.
    import transformers

    config_class, model_class, own = CONFIGS[family]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(
        **_COMMON | own | {"num_hidden_layers": layers},
        tie_word_embeddings=tied,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model: PreTrainedModel = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def save_tiny_model(folder: Path, family: str, tied: bool) -> Path:
    tiny_model(family, tied).save_pretrained(folder)
    return folder
