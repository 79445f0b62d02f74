"""Inputs that the ranks and the tests build alike."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.qwen3 import VOCABULARY

TEMPERATURE = 0.7
LENGTHS = (14, 10)
"""Of the trajectories in the pack, which two tensor ranks can share evenly."""


def pack_tokens() -> Tensor:
    """The pack's token ids, int64 [24], one trajectory after the other."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=generator)


def loss_tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Places in the pack that carry loss, their targets (the last id is one), their weights."""
    at_K = torch.tensor([3, 4, 9, 14, 19, 20, 23])
    target_K = torch.tensor([0, 100, 50, 51, 7, 99, 13])
    weight_K = torch.tensor([1.0, -0.5, 2.0, 0.25, 0.0, -1.5, 0.75])
    return at_K, target_K, weight_K
