"""What two ranks run for test_checkpoints.py: `python -m tests.checkpoints_workers function …`."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_gmc.checkpoints import Checkpoints
from megatron_gmc.errors import OutputError
from megatron_gmc.learner.background_save import PendingSave
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.run_folder import RunFolder
from tests.learner.steps import ADAMW, imitate, new_learner


def before_writing(wait: Callable[[], None]) -> None:
    """Have `wait` called on the thread that writes, before it does."""
    write = PendingSave.write

    def later(save: PendingSave) -> list[Path]:
        wait()
        return write(save)

    PendingSave.write = later  # type: ignore[method-assign]


def check(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh, run = Mesh.create(2, 1), RunFolder(Path(folder) / "run")
    learner = new_learner(Path(folder) / "model", mesh, ADAMW)
    with Checkpoints(run, learner, keep=5) as checkpoints:
        _commit_once_all_have_written(checkpoints, run, mesh.rank)
        imitate(learner, 1)
        _fail(checkpoints, run, mesh.rank, _no_space)
        _fail(checkpoints, run, mesh.rank, lambda: _occupy(run.checkpoints))
    mesh.close()
    dist.destroy_process_group()


def _commit_once_all_have_written(checkpoints: Checkpoints, run: RunFolder, rank: int) -> None:
    gate = threading.Event()
    original = PendingSave.write
    if rank == 1:
        before_writing(lambda: _await(gate))
    checkpoints.begin(None)
    time.sleep(0.5)
    assert not checkpoints.poll()
    assert run.last_checkpoint() is None
    gate.set()
    while not checkpoints.poll():
        time.sleep(0.01)
    assert run.last_checkpoint() == run.checkpoint(0)
    PendingSave.write = original  # type: ignore[method-assign]


def _fail(checkpoints: Checkpoints, run: RunFolder, rank: int, fault: Callable[[], None]) -> None:
    """Rank 1 cannot write: both say so, and only the checkpoint before is left."""
    original = PendingSave.write
    if rank == 1:
        before_writing(fault)
    checkpoints.begin(None)
    try:
        checkpoints.finish()
    except OutputError as error:
        print(error)
    PendingSave.write = original  # type: ignore[method-assign]
    dist.barrier()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000000"]
    dist.barrier()


def _no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _occupy(checkpoints: Path) -> None:
    """A folder where rank 1's file should be: megatron's own writer fails."""
    (partial,) = checkpoints.glob("*.partial")
    (partial / "learner" / "__1_0.distcp").mkdir()


def _await(gate: threading.Event) -> None:
    assert gate.wait(timeout=60)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
