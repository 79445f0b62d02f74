"""Two tensor ranks of megatron load a checkpoint and save it again."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_gmc.convert.hf_config import load_shape
from megatron_gmc.learner.checkpoint import load_model, save_model
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model import build_model
from megatron_gmc.learner.model_weights import named_weights


def reload(source: str, checkpoint: str, target: str) -> None:
    torch.set_num_threads(1)
    shape, mesh = load_shape(Path(source)), Mesh.create(2, 1)
    chunks = build_model(shape, mesh)
    load_model(Path(checkpoint), chunks)
    weights = dict(named_weights(chunks, shape, mesh))
    saved = Path(target) / "saved"
    if mesh.rank == 0:
        save_file(weights, Path(target) / "loaded.safetensors")
        saved.mkdir()
    torch.distributed.barrier()
    save_model(saved, chunks)
    mesh.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
