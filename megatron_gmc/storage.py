"""Writing a run's output: what the libraries raise where a disk fails them, in words."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gmc.errors import OutputError
from megatron_gmc.learner.checkpoint import reason_of


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write `path`, as on a full disk, into an OutputError."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        there = path.parent if path.parent.exists() else Path(path.anchor)
        free = shutil.disk_usage(there).free // 2**20
        raise OutputError(
            f"cannot write {path}: {reason_of(error)} ({free} MiB are free there); make room, "
            "then start the command again, train with --resume"
        ) from error
