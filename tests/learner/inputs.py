"""Inputs that the ranks and the tests build alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.qwen3 import VOCABULARY

TEMPERATURE = 0.7


def model_input() -> tuple[Tensor, Tensor]:
    """Tokens and positions, int64 [2, 12]."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
    return tokens, torch.arange(12).expand(2, -1).contiguous()


def model_rows() -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Which positions carry loss, their targets (the last token is one), and a weight for each."""
    row = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    column = torch.tensor([3, 4, 9, 0, 5, 6, 10])
    targets = torch.tensor([0, 100, 50, 51, 7, 99, 13])
    weights = torch.tensor([1.0, -0.5, 2.0, 0.25, 0.0, -1.5, 0.75])
    return (row, column), targets, weights


@dataclass(frozen=True)
class LogProbCase:
    """Logits [K, vocabulary], targets [K] and weights [K] of a weighted sum of log-probs."""

    logits: Tensor
    targets: Tensor
    weights: Tensor
    temperature: float = 1.0

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]

    def padded_logits(self, ranks: int) -> Tensor:
        """With padding columns so large that they would win any softmax that they entered."""
        padding = -self.vocab_size % ranks
        return torch.nn.functional.pad(self.logits, (0, padding), value=1e4)


def log_prob_input() -> dict[str, LogProbCase]:
    generator = torch.Generator().manual_seed(2)

    def logits(rows: int, vocabulary: int, scale: float = 3.0) -> Tensor:
        return torch.randn(rows, vocabulary, generator=generator) * scale

    targets = torch.tensor([0, 50, 51, 100])
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0])
    impossible = logits(4, VOCABULARY)
    impossible[:, 10:80] = -torch.inf
    return {
        "plain": LogProbCase(logits(4, VOCABULARY), targets, weights),
        "tempered": LogProbCase(logits(4, VOCABULARY), targets, weights, 0.7),
        "double": LogProbCase(logits(4, VOCABULARY).double(), targets, weights.double(), 0.7),
        "halves": LogProbCase(logits(4, VOCABULARY).bfloat16(), targets, weights, 0.7),
        "huge": LogProbCase(logits(4, VOCABULARY, 3e4), targets, weights),
        "impossible": LogProbCase(impossible, torch.tensor([0, 9, 80, 100]), weights),
        "no_rows": LogProbCase(logits(0, VOCABULARY), targets[:0], weights[:0]),
        "rank_of_padding": LogProbCase(logits(4, 5), torch.tensor([0, 1, 2, 4]), weights),
    }
