"""A small learner and batches for it, the same on every rank."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gmc.convert.hf_config import load_shape
from megatron_gmc.convert.hugging_face import stream_tensors
from megatron_gmc.learner.batch import Batch, Row
from megatron_gmc.learner.checkpoint import commit, open_partial
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.optim_config import OptimConfig
from megatron_gmc.sft import imitation_gradient
from tests.qwen3 import VOCABULARY

# With this eps AdamW divides by nothing so small that it would blow up rounding.
ADAMW = OptimConfig(
    lr=0.01, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, clip_grad=1.0, warmup_steps=3
)
DISTRIBUTED = ADAMW.model_copy(update={"distributed": True})
STEPS = 6


def new_learner(
    folder: Path,
    mesh: Mesh,
    optim: OptimConfig,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
) -> Learner:
    learner = Learner(load_shape(folder), mesh, optim, steps, dtype)
    learner.load(stream_tensors(folder))
    return learner


def random_rows(seed: int, groups: int = 3, group_size: int = 2) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for i in range(groups * group_size):
        length = rng.randint(2, 9)
        rows.append(
            Row(
                id=100 + i,
                group=i // group_size,
                prompt_tokens=[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))],
                response_tokens=[rng.randrange(VOCABULARY) for _ in range(length)],
                loss_mask=[True] * length,
                behaviour_log_probs=[-4.5 + rng.gauss(0, 0.1) for _ in range(length)],
                reward=rng.random(),
                oldest_version=0,
            )
        )
    return rows


def imitate(learner: Learner, seed: int) -> float:
    """One optimizer step on the batch of `seed`; the gradient's norm."""
    imitation_gradient(learner, Batch.from_rows(random_rows(seed)), micro_batch_tokens=64)
    return learner.apply()


def weights_of(learner: Learner) -> dict[str, Tensor]:
    """Whole weights on rank 0, nothing elsewhere; collective."""
    return dict(learner.weights())


@contextmanager
def committed_folder(path: Path, mesh: Mesh) -> Iterator[Path]:
    """A folder that all ranks fill and that appears under `path` only once it is whole."""
    partial = open_partial(path, mesh)
    try:
        yield partial
    except BaseException:
        # On a full disk it is in the way of everything else.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    dist.barrier()
    if mesh.rank == 0:
        commit(partial, path)
    dist.barrier()
