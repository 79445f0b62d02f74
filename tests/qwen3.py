"""The small Qwen3 model of most tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.models import LAYERS, VOCABULARY, tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LAYERS", "VOCABULARY", "save_tiny_qwen3", "tiny_qwen3"]


def tiny_qwen3(tied: bool, seed: int = 0) -> PreTrainedModel:
    """8 heads in 4 query groups, a head size that is not hidden / heads, norms away from 1."""
    return tiny_model("qwen3", tied, seed)


def save_tiny_qwen3(folder: Path, tied: bool, dtype: torch.dtype = torch.float32) -> Path:
    tiny_qwen3(tied).to(dtype).save_pretrained(folder)
    return folder
