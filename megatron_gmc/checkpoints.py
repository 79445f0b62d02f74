"""The checkpoints of one run: written beside training, committed whole, chosen when it resumes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist

from megatron_gmc import manifest
from megatron_gmc.errors import OutputError
from megatron_gmc.learner.background_save import PendingSave
from megatron_gmc.learner.checkpoint import LearnerSaver, commit, open_partial
from megatron_gmc.learner.learner import Learner
from megatron_gmc.rollout.state import RolloutState
from megatron_gmc.run_folder import RunFolder
from megatron_gmc.storage import writing


@dataclass(frozen=True)
class _Write:
    """One checkpoint under way."""

    target: Path
    partial: Path
    save: PendingSave
    done: Future[None]


class Checkpoints:
    """Writes a run's checkpoints; every rank makes the same calls in the same order.

    `begin` returns once the tensors are copied. A thread of each rank writes; the folder gets its
    name once all ranks have written, in `poll` or in the next call that must wait for it. A process
    that dies before leaves a folder with another name, which nobody reads.
    """

    def __init__(self, folder: RunFolder, learner: Learner, keep: int) -> None:
        self._folder = folder
        self._learner = learner
        self._saver = LearnerSaver(learner)
        self._keep = keep
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._write: _Write | None = None
        committed = folder.checkpoint(learner.version).exists()
        self.newest = learner.version if committed else None
        """Version of the last checkpoint, which may be under way."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        """Where the run has failed, take away what is half written: a full disk needs the room."""
        self._writer.shutdown()
        if self._write is not None and self._learner.mesh.rank == 0:
            shutil.rmtree(self._write.partial, ignore_errors=True)

    def begin(self, rollout: RolloutState | None) -> None:
        """Begin the checkpoint of the learner's version; rank 0 gives the rollout's state.

        Waits for the one before. Raises OutputError where the disk refuses.
        """
        self.finish()
        mesh = self._learner.mesh
        target = self._folder.checkpoint(self._learner.version)
        with writing(target):
            partial = open_partial(target, mesh)
            save = self._saver.begin(partial / "learner")
        self.newest = self._learner.version
        done = self._writer.submit(_write, partial, save, rollout, mesh.rank)
        self._write = _Write(target, partial, save, done)

    def poll(self) -> bool:
        """Commit the checkpoint under way if every rank has written its part; whether one was."""
        if self._write is None or not self._everywhere(self._write.done.done()):
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Wait for the checkpoint under way, if any, and commit it.

        Raises OutputError, on every rank, where one could not write.
        """
        if self._write is None:
            return
        write, self._write = self._write, None
        try:
            with writing(write.target):
                self._commit(write)
        except BaseException:
            # On a full disk it is in the way of everything else.
            shutil.rmtree(write.partial, ignore_errors=True)
            raise

    @contextmanager
    def completed_on(self, error: type[Exception]) -> Iterator[None]:
        """Commit the checkpoint under way where `error` is raised, as it is on every rank alike."""
        try:
            yield
        except error:
            self.finish()
            raise

    def _commit(self, write: _Write) -> None:
        fault = write.done.exception()
        if not self._everywhere(fault is None):
            raise fault or OutputError(
                f"{write.target} is not written, since another rank could not; see its message"
            )
        write.save.finish()
        if self._learner.mesh.rank == 0:
            manifest.seal(write.partial)
            commit(write.partial, write.target)
            self._folder.drop_old_checkpoints(self._keep)
        dist.barrier()

    def _everywhere(self, here: bool) -> bool:
        """Whether `here` is true on every rank."""
        flag = torch.tensor(int(here), device=self._learner.mesh.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)


def _write(partial: Path, save: PendingSave, rollout: RolloutState | None, rank: int) -> None:
    """Write this rank's part of a checkpoint and list it, on the thread."""
    files = save.write()
    if rollout is not None:
        (partial / "rollout").mkdir()
        rollout.save(partial / "rollout")
        files += (partial / "rollout").iterdir()
    manifest.list_part(partial, rank, files)


def last_good(folder: RunFolder) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose every byte is what was written, and the faults of newer ones.

    None where the run has no checkpoint. Raises ValueError where it has some and all are damaged.
    """
    faults: list[str] = []
    for path in reversed(folder.complete_checkpoints()):
        fault = manifest.fault_of(path)
        if fault is None:
            return path, faults
        faults.append(f"{path.name} is damaged: {fault}")
    if faults:
        raise ValueError(
            f"no checkpoint of the run in {folder.path} can be used: {'; '.join(faults)}; remove "
            "the run's folder to start anew"
        )
    return None, []


def resume_from(folder: RunFolder, chosen: Path | None, faults: Sequence[str]) -> list[str]:
    """Make the folder ready to go on from `chosen`, record it, and say it in a few lines.

    Damaged checkpoints are renamed, since the run will write those versions again, and what a
    crash left half written is removed.
    """
    for partial in folder.checkpoints.glob("step_*.partial"):
        shutil.rmtree(partial)
    for path in folder.complete_checkpoints():
        if chosen is not None and path > chosen:
            damaged = path.with_name(path.name + ".damaged")
            shutil.rmtree(damaged, ignore_errors=True)
            path.rename(damaged)
    source = chosen.name if chosen else None
    with folder.resumes.open("a", encoding="utf-8") as record:
        record.write(json.dumps({"time": time.time(), "from": source, "refused": faults}) + "\n")
    said = [f"{fault}; it is kept as {fault.split()[0]}.damaged" for fault in faults]
    return [*said, f"goes on from {source or 'its beginning, since it has no checkpoint'}"]
