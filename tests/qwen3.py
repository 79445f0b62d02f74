"""Small Qwen3 models of transformers, the reference that conversion and learner are held to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

VOCABULARY = 101  # prime, so that no number of tensor ranks divides it
LAYERS = 6


def tiny_qwen3(tied: bool, seed: int = 0) -> Qwen3ForCausalLM:
    """8 heads in 4 query groups, a head size that is not hidden / heads, norms away from 1."""
    # Ranks that need the sizes alone are spared the seconds that this import takes.
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            initializer_range=0.1,
            attn_implementation="eager",
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def save_tiny_qwen3(folder: Path, tied: bool, dtype: torch.dtype = torch.float32) -> Path:
    tiny_qwen3(tied).to(dtype).save_pretrained(folder)
    return folder
