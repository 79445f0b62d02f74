"""Tiny Hugging Face folders with random weights, and log-probs computed from them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 24
CONTEXT = 64


def tiny_config(vocabulary: int = VOCABULARY, *, tied: bool = True) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=CONTEXT,
        rope_theta=1e4,
        tie_word_embeddings=tied,
        initializer_range=0.3,  # wide enough for the distributions to be far from uniform
    )


def save_tiny_model(
    folder: Path, seed: int, vocabulary: int = VOCABULARY, *, tied: bool = True
) -> Path:
    torch.manual_seed(seed)
    Qwen3ForCausalLM(tiny_config(vocabulary, tied=tied)).save_pretrained(folder)
    return folder


def oracle_model(folder: Path) -> PreTrainedModel:
    """transformers' own loading and its plain attention; the engine uses neither."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.no_grad()
def oracle_log_probs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> Tensor:
    """Log-probs of a response, float64 [T], from one forward without cache or padding."""
    logits = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0].double()
    table = torch.log_softmax(logits / temperature, dim=-1)
    # the first response token's log-prob stands at the prompt's last position
    rows = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
    return table[rows, torch.tensor(list(response))]
