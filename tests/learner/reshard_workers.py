"""What four ranks run for test_reshard.py; results go to files."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_gmc.learner.batch import Batch
from megatron_gmc.learner.checkpoint import load_learner, save_learner
from megatron_gmc.learner.learner import Learner
from megatron_gmc.sft import imitation_gradient
from tests.learner.steps import (
    ADAMW,
    DISTRIBUTED,
    committed_folder,
    imitate,
    new_learner,
    random_rows,
    weights_of,
)
from tests.learner.workers import create_mesh

OPTIMIZERS = {"plain": ADAMW, "distributed": DISTRIBUTED}


def check(folder: str, *names: str) -> None:
    """Each name is model:optimizer:mesh:meshes: saved on the first mesh, loaded on the others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        model, optimizer, saved_on, *loaded_on = name.replace(",", ":").split(":")
        stem = Path(folder) / f"{model}-{optimizer}-{saved_on}"
        mesh = create_mesh(saved_on)
        learner = new_learner(Path(folder) / model, mesh, OPTIMIZERS[optimizer])
        imitate(learner, 1)
        imitate(learner, 2)
        with committed_folder(stem, mesh) as partial:
            save_learner(partial / "learner", learner)
        _go_on(learner, f"{stem}-{saved_on}")
        mesh.close()
        for other in loaded_on:
            mesh = create_mesh(other)
            # Other weights, so that nothing is right that was not loaded.
            learner = new_learner(Path(folder) / f"{model}-other", mesh, OPTIMIZERS[optimizer])
            load_learner(stem / "learner", learner)
            _go_on(learner, f"{stem}-{other}")
            mesh.close()
    dist.destroy_process_group()


def _go_on(learner: Learner, stem: str) -> None:
    """Save the weights as they are, and what two more steps find and leave."""
    results = {f"loaded/{name}": tensor for name, tensor in weights_of(learner).items()}
    losses = []
    for seed in (3, 4):
        batch = Batch.from_rows(random_rows(seed))
        losses.append(imitation_gradient(learner, batch, micro_batch_tokens=64))
        learner.apply()
    results |= {f"next/{name}": tensor for name, tensor in weights_of(learner).items()}
    results["losses"] = Tensor(losses)
    if learner.mesh.rank == 0:
        save_file(results, stem)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
