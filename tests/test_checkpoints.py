"""A run's checkpoints: the learner trains on, all ranks commit together, a failure leaves none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_gmc.checkpoints import Checkpoints
from megatron_gmc.learner.background_save import PendingSave
from megatron_gmc.learner.checkpoint import load_learner
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.manifest import fault_of
from megatron_gmc.run_folder import RunFolder
from tests.distributed import run_ranks
from tests.learner.steps import ADAMW, imitate, new_learner, weights_of
from tests.qwen3 import save_tiny_qwen3


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    mesh = Mesh.create(1, 1)
    yield mesh
    mesh.close()


def test_training_goes_on_while_it_is_written(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is what the learner was, although it has taken steps since; twice in a row.

    The second checkpoint uses the first one's memory.
    """
    gate, write = threading.Event(), PendingSave.write

    def write_later(save: PendingSave) -> list[Path]:
        assert gate.wait(timeout=60)
        return write(save)

    monkeypatch.setattr(PendingSave, "write", write_later)
    model, run = save_tiny_qwen3(tmp_path / "model", tied=True), RunFolder(tmp_path / "run")
    learner, other = (new_learner(model, mesh, ADAMW) for _ in range(2))
    with Checkpoints(run, learner, keep=5) as checkpoints:
        for first in (1, 3):
            imitate(learner, first)
            expected = {name: weight.clone() for name, weight in weights_of(learner).items()}
            gate.clear()
            checkpoints.begin(None)
            imitate(learner, first + 1)
            assert not checkpoints.poll()
            gate.set()
            checkpoints.finish()
            path = run.last_checkpoint()
            assert path == run.checkpoint(first)
            assert fault_of(path) is None
            load_learner(path / "learner", other)
            assert other.version == first
            for name, weight in weights_of(other).items():
                assert torch.equal(weight, expected[name]), name
            # The moments and their count are those of that moment as well.
            imitate(other, first + 1)
            for name, weight in weights_of(other).items():
                torch.testing.assert_close(weight, weights_of(learner)[name], rtol=0, atol=1e-6)


def test_two_ranks_commit_together_or_not(tmp_path: Path) -> None:
    """No folder before both have written; where one cannot, both say so and nothing is left."""
    save_tiny_qwen3(tmp_path / "model", tied=True)
    said = run_ranks("tests.checkpoints_workers", "check", 2, str(tmp_path))
    first, second = ([line for line in text.splitlines() if "cannot" in line] for text in said)
    assert "another rank could not; see its message" in said[0]
    assert "No space left on device" in second[0]
    assert "__1_0.distcp" in first[-1]
    assert "a rank could not write its part" in second[-1]
