"""What two ranks run for test_checkpoint.py and test_batch.py; results go to files."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_gmc.learner.batch import Batch, broadcast_batch
from megatron_gmc.learner.checkpoint import load_learner, save_learner
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.mesh import Mesh
from tests.learner.steps import (
    ADAMW,
    DISTRIBUTED,
    committed_folder,
    imitate,
    new_learner,
    random_rows,
    weights_of,
)


def check(folder: str) -> None:
    """One world for everything: gloo does not start a second one in the same process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    root = Path(folder)
    for name, optim, sizes in (("plain", ADAMW, (2, 1)), ("distributed", DISTRIBUTED, (1, 1))):
        mesh = Mesh.create(*sizes)
        learner = new_learner(root / "model", mesh, optim)
        imitate(learner, 1)
        imitate(learner, 2)
        with committed_folder(root / name, mesh) as partial:
            save_learner(partial / "learner", learner)
        _save_weights(learner, root / f"{name}-saved")
        imitate(learner, 3)
        _save_weights(learner, root / f"{name}-next")
        mesh.close()
    for name, optim, sizes in (
        ("plain", ADAMW, (2, 1)),
        ("plain", ADAMW, (1, 2)),
        ("distributed", DISTRIBUTED, (1, 1)),
        ("distributed", DISTRIBUTED, (2, 1)),
    ):
        mesh = Mesh.create(*sizes)
        _go_on(root, name, new_learner(root / "other", mesh, optim))
        mesh.close()
    mesh = Mesh.create(1, 1)
    batch = Batch.from_rows(random_rows(7)) if mesh.rank == 0 else None
    received = asdict(broadcast_batch(batch, mesh))
    torch.save(received, root / f"batch.rank{mesh.rank}")
    mesh.close()
    dist.destroy_process_group()


def _go_on(root: Path, name: str, learner: Learner) -> None:
    load_learner(root / name / "learner", learner)
    mesh = learner.mesh
    stem = f"{name}-{mesh.tensor_size}-{mesh.pipeline_size}-{mesh.data_size}"
    _save_weights(learner, root / f"{stem}-saved")
    imitate(learner, 3)
    _save_weights(learner, root / f"{stem}-next")


def _save_weights(learner: Learner, path: Path) -> None:
    weights = weights_of(learner)
    if learner.mesh.rank == 0:
        save_file(weights, path)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
