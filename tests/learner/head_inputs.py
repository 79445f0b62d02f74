"""Hidden states, heads and tokens that the ranks and the test of the log-probs build alike."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.models import VOCABULARY, tiny_model

HIDDEN = 32
TOKENS = 12
PADDED = 104
"""Columns of every head; what lies beyond a case's vocabulary is padding."""


@dataclass(frozen=True)
class HeadCase:
    """What goes into the scores, and the gradients that come back to them."""

    hidden: Tensor  # [1, TOKENS, HIDDEN]
    weight: Tensor  # [PADDED, HIDDEN]
    at_K: Tensor
    target_K: Tensor
    log_prob_gradient_K: Tensor
    entropy_gradient_K: Tensor
    vocab_size: int = VOCABULARY
    temperature: float = 0.7
    tied: bool = False


def head_cases() -> dict[str, HeadCase]:
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight = normal(PADDED, HIDDEN)
    # So large that they would win any softmax that they entered.
    weight[VOCABULARY:] = 1e3
    plain = HeadCase(
        hidden=normal(1, TOKENS, HIDDEN),
        weight=weight,
        at_K=torch.tensor([3, 0, 11, 4, 5, 8, 6]),
        target_K=torch.tensor([0, 100, 50, 51, 52, 99, 13]),
        log_prob_gradient_K=torch.tensor([1.0, -0.5, 2.0, 0.25, 0.0, -1.5, 0.75]).double(),
        entropy_gradient_K=torch.tensor([0.5, 1.0, 0.0, -2.0, 0.1, -0.3, 0.7]).double(),
    )
    impossible = plain.weight.clone()
    impossible[10:80, 0] = -torch.inf
    possible = plain.hidden.clone()
    possible[..., 0] = 0.5
    few = torch.tensor([0, 9, 5, 3, 39, 20, 30])
    return {
        "plain": plain,
        "tied": replace(plain, tied=True),
        "single": replace(plain, hidden=plain.hidden.float(), weight=plain.weight.float()),
        "halves": replace(plain, hidden=plain.hidden.bfloat16(), weight=plain.weight.bfloat16()),
        "huge": replace(plain, hidden=plain.hidden * 1e4, temperature=1.0),
        "impossible": replace(
            plain, hidden=possible, weight=impossible, target_K=few.where(few < 10, 80)
        ),
        "no_tokens": replace(
            plain,
            at_K=plain.at_K[:0],
            target_K=plain.target_K[:0],
            log_prob_gradient_K=plain.log_prob_gradient_K[:0],
            entropy_gradient_K=plain.entropy_gradient_K[:0],
        ),
        # At two ranks and more the last one has padding alone.
        "rank_of_padding": replace(plain, vocab_size=40, target_K=few),
    }


def qwen3_tokens() -> Tensor:
    """int64 [1, TOKENS]."""
    return torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(3))


def qwen3_case() -> HeadCase:
    """The plain case with the hidden states and the head of transformers' Qwen3 in float64."""
    model, plain = tiny_model("qwen3", tied=False).double(), head_cases()["plain"]
    weight = plain.weight.clone()
    with torch.no_grad():
        weight[:VOCABULARY] = model.lm_head.weight
        hidden = model.model(qwen3_tokens()).last_hidden_state
    return replace(plain, hidden=hidden, weight=weight)
