"""Megatron dist-checkpoints of a learner, written so that a crash leaves the old one or the new."""

from __future__ import annotations

import os
import shutil
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gmc.convert.dist_metadata import read_metadata
from megatron_gmc.learner.background_save import PendingSave, StateCopies, begin_save
from megatron_gmc.learner.learner import Learner
from megatron_gmc.learner.mesh import Mesh

StateTree: TypeAlias = "dict[str, object]"

# Moments can be loaded on another mesh, at the price of gathering them when they are saved.
_RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


def open_partial(path: Path, mesh: Mesh) -> Path:
    """Make the empty folder that is to become `path`; collective."""
    partial = path.with_name(path.name + ".partial")
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier(mesh)
    return partial


def commit(partial: Path, path: Path) -> None:
    """Flush what is in `partial` to the disk and give it its name; by one rank."""
    for file in (f for f in partial.rglob("*") if f.is_file()):
        _sync(file)
    partial.rename(path)
    _sync(path.parent)


class LearnerSaver:
    """Saves one learner again and again, each time beside its training."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._copies = StateCopies()
        self._validated = False

    def begin(self, folder: Path) -> PendingSave:
        """Copy model, optimizer, schedule, random state and version, to be written to `folder`.

        Collective. `folder` must not exist. The learner may train on when this returns; the save
        must be finished before the next one begins.
        """
        mesh = self._learner.mesh
        if mesh.rank == 0:
            folder.mkdir()
        _barrier(mesh)
        state = _state(self._learner, loading=False)
        self._copies.take(state)
        pending = begin_save(folder, state, validate=not self._validated)
        self._validated = True
        return pending


def save_learner(folder: Path, learner: Learner) -> None:
    """Write model, optimizer, schedule, random state and version to `folder`; collective."""
    _complete(LearnerSaver(learner).begin(folder))


def load_learner(folder: Path, learner: Learner) -> None:
    """Read what `save_learner` wrote, on the same mesh or another; collective.

    Raises ValueError where the checkpoint is damaged, is another model's, or holds the moments of
    another kind of optimizer, which cannot be carried over.
    """
    _check_pickles(folder)
    with _reading(folder):
        _check_kind(folder, learner)
        state = dist_checkpointing.load(_state(learner, loading=True), str(folder))
    _load_chunks(learner.chunks, state["model"])
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.scheduler.load_state_dict(state["scheduler"])
    learner.version = int(state["version"])
    torch.set_rng_state(state["random"])


def save_model(folder: Path, chunks: Sequence[GPTModel]) -> None:
    """Write the weights alone into the empty `folder`; collective."""
    _complete(begin_save(folder, {"model": _sharded(chunks)}, validate=True))


def _complete(pending: PendingSave) -> None:
    pending.write()
    dist.barrier()
    pending.finish()


def load_model(folder: Path, chunks: Sequence[GPTModel]) -> None:
    """Read the weights alone, of `save_model`'s or `save_learner`'s folder; collective.

    Raises ValueError where the checkpoint is damaged or is another model's.
    """
    _check_pickles(folder)
    with _reading(folder):
        state = dist_checkpointing.load({"model": _sharded(chunks)}, str(folder))
    _load_chunks(chunks, state["model"])


def _check_pickles(folder: Path) -> None:
    """Megatron unpickles what lies in a checkpoint as it is: look through it before."""
    try:
        read_metadata(folder)
    except ValueError as error:
        raise ValueError(f"cannot read the checkpoint {folder}: {error}") from None


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    with warnings.catch_warnings():
        # Megatron calls functions of torch that are on their way out, which no user can change.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        except (CheckpointingException, CheckpointException, OSError, EOFError) as error:
            raise ValueError(f"cannot read the checkpoint {folder}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """One line; of torch's CheckpointException, what it wraps."""
    if isinstance(error, CheckpointException):
        if not error.failures:  # only the rank that closes a checkpoint is told
            return "a rank could not write its part"
        error = next(iter(error.failures.values()))[0]
    lines = str(error).splitlines()
    # Megatron lists every tensor of the checkpoint where one is missing.
    return textwrap.shorten(lines[0], 300) if lines else type(error).__name__


def _state(learner: Learner, *, loading: bool) -> StateTree:
    model = _sharded(learner.chunks)
    return {
        "model": model,
        "optimizer": learner.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=_RESHARDABLE
        ),
        "scheduler": learner.scheduler.state_dict(),
        "optimizer_kind": _optimizer_kind(learner),
        "version": learner.version,
        # One state for all ranks: nothing in the learner draws numbers that differ by rank.
        "random": ShardedObject("random", torch.get_rng_state(), (1,), (0,), learner.mesh.rank),
    }


def _optimizer_kind(learner: Learner) -> str:
    """In the words of the config."""
    optimizer = learner.optimizer.chained_optimizers[0]
    name = "sgd" if "momentum" in optimizer.param_groups[0] else "adamw"
    distributed = str(isinstance(optimizer, DistributedOptimizer)).lower()
    return f"optim.name {name}, optim.distributed {distributed}"


def _check_kind(folder: Path, learner: Learner) -> None:
    common = dist_checkpointing.load_common_state_dict(str(folder))
    saved = common.get("optimizer_kind", "no optimizer")
    own = _optimizer_kind(learner)
    if saved != own:
        raise ValueError(
            f"the checkpoint {folder} was written with {saved}, and this run has {own}; the "
            "optimizer's moments cannot be carried over, so set both as they were"
        )


def _sharded(chunks: Sequence[GPTModel]) -> StateTree:
    """What each chunk holds of the model; on disk it lies under names that no mesh changes."""
    return {f"chunk{index}": chunk.sharded_state_dict() for index, chunk in enumerate(chunks)}


def _load_chunks(chunks: Sequence[GPTModel], state: Mapping[str, StateTree]) -> None:
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"chunk{index}"], strict=True)


def _barrier(mesh: Mesh) -> None:
    if mesh.world_size > 1:
        dist.barrier()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
