"""What the learner's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_gmc.learner.mesh import Mesh
from tests.distributed import run_ranks
from tests.qwen3 import save_tiny_qwen3, tiny_qwen3


@pytest.fixture(scope="package")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left: see checkpoint_workers.check."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save_tiny_qwen3(folder / "model", tied=True)
    tiny_qwen3(tied=True, seed=5).save_pretrained(folder / "other")
    run_ranks("tests.learner.checkpoint_workers", "check", 2, str(folder))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tied model."""
    return save_tiny_qwen3(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """One rank, for all tests of a module."""
    mesh = Mesh.create(1, 1)
    yield mesh
    mesh.close()


@pytest.fixture
def one_rank() -> Iterator[Mesh]:
    mesh = Mesh.create(1, 1)
    yield mesh
    mesh.close()
