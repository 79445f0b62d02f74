"""Whether a Megatron checkpoint and a Hugging Face folder compute the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.learner import output_head
from megatron_gmc.learner.checkpoint import load_model
from megatron_gmc.learner.core_attention import pack_of
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model import build_model

PROMPTS = (1, 17, 64)
"""Lengths in tokens."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Of the largest logit: what rounding in this dtype can do in a deep model."""


@dataclass(frozen=True)
class Comparison:
    """Over all prompts, positions and tokens of the vocabulary."""

    largest_difference: float
    largest_logit: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.largest_difference <= self.tolerance * self.largest_logit

    def __str__(self) -> str:
        return (
            f"largest difference of a logit {self.largest_difference:.2g}, of logits up to "
            f"{self.largest_logit:.3g}, over {len(PROMPTS)} prompts of random tokens"
        )


def compare(folder: Path, checkpoint: Path, shape: ModelShape, dtype: torch.dtype) -> Comparison:
    """Compare logits of transformers on `folder` with those of the learner on `checkpoint`.

    Both compute in `dtype`, in this process; memory: both models.
    """
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    mesh = Mesh.create(1, 1)
    chunks = build_model(shape, mesh, dtype)
    load_model(checkpoint, chunks)
    generator = torch.Generator().manual_seed(0)
    difference = logit = 0.0
    for length in (min(length, shape.max_positions) for length in PROMPTS):
        tokens = torch.randint(shape.vocab_size, (1, length), generator=generator)
        pack = pack_of([length], size=1, rank=0, device=mesh.device)
        with torch.no_grad():
            expected = theirs(tokens).logits[0].float()
            hidden = chunks[0](tokens, None, None, packed_seq_params=pack)
            ours = output_head.logits(chunks[0], hidden)[0, :, : shape.vocab_size].float()
        difference = max(difference, float((ours - expected).abs().max()))
        logit = max(logit, float(expected.abs().max()))
    mesh.close()
    return Comparison(difference, logit, TOLERANCE[dtype])
