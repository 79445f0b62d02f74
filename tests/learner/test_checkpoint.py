"""Checkpoints: whole or not there, and good for any mesh."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_gmc.learner.checkpoint import (
    load_learner,
    load_model,
    save_learner,
)
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.optim_config import OptimConfig
from megatron_gmc.run_folder import RunFolder
from tests.learner.steps import (
    ADAMW,
    DISTRIBUTED,
    committed_folder,
    imitate,
    new_learner,
    weights_of,
)


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize(
    "stem", ["plain-2-1-1", "plain-1-2-1", "distributed-1-1-2", "distributed-2-1-1"]
)
def test_a_checkpoint_goes_on_on_two_ranks(checkpoints: Path, stem: str) -> None:
    """Tensor-pipeline-data; `plain` was saved at TP 2, `distributed` (D5) at DP 2."""
    name = stem.split("-")[0]
    saved, after = (load_file(checkpoints / f"{stem}-{what}") for what in ("saved", "next"))
    assert_equal(saved, load_file(checkpoints / f"{name}-saved"))
    expected = load_file(checkpoints / f"{name}-next")
    if stem in ("plain-2-1-1", "distributed-1-1-2"):
        assert_equal(after, expected)
    else:
        assert largest_difference(after, expected) < 1e-6


@pytest.mark.parametrize(("name", "optim"), [("plain", ADAMW), ("distributed", DISTRIBUTED)])
def test_a_checkpoint_goes_on_on_one_rank(
    checkpoints: Path, one_rank: Mesh, name: str, optim: OptimConfig
) -> None:
    """The next step needs the moments, their count, the schedule and the version."""
    learner = new_learner(checkpoints / "other", one_rank, optim)
    load_learner(checkpoints / name / "learner", learner)
    assert learner.version == 2
    assert_equal(weights_of(learner), load_file(checkpoints / f"{name}-saved"))
    expected = load_file(checkpoints / f"{name}-next")
    imitate(learner, 3)
    assert learner.learning_rate == pytest.approx(0.01)
    assert largest_difference(weights_of(learner), expected) < 1e-6


def test_weights_without_moments_go_elsewhere(checkpoints: Path, one_rank: Mesh) -> None:
    """So that the tests above say something: the moments' part in the next step is large."""
    learner = new_learner(checkpoints / "other", one_rank, ADAMW)
    load_model(checkpoints / "plain" / "learner", learner.chunks)
    learner.optimizer.reload_model_params()
    for _ in range(2):
        learner.skip()
    imitate(learner, 3)
    expected = load_file(checkpoints / "plain-next")
    assert largest_difference(weights_of(learner), expected) > 1e-3


def test_the_random_state_comes_back(checkpoints: Path, one_rank: Mesh, tmp_path: Path) -> None:
    learner = new_learner(checkpoints / "model", one_rank, ADAMW)
    imitate(learner, 1)
    torch.manual_seed(11)
    save_learner(tmp_path / "learner", learner)
    expected = torch.rand(3)
    torch.manual_seed(12)
    load_learner(tmp_path / "learner", learner)
    assert torch.equal(torch.rand(3), expected)


def cut_off(folder: Path) -> None:
    path = next(iter(sorted(folder.glob("*.distcp"))))
    os.truncate(path, path.stat().st_size // 2)


def missing(folder: Path) -> None:
    next(iter(sorted(folder.glob("*.distcp")))).unlink()


@pytest.mark.parametrize("damage", [cut_off, missing])
def test_a_damaged_checkpoint_is_named(
    checkpoints: Path, one_rank: Mesh, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = tmp_path / "learner"
    shutil.copytree(checkpoints / "plain" / "learner", folder)
    damage(folder)
    learner = new_learner(checkpoints / "model", one_rank, ADAMW)
    with pytest.raises(ValueError, match=f"cannot read the checkpoint {folder}: ") as caught:
        load_learner(folder, learner)
    assert "\n" not in str(caught.value)
    assert learner.version == 0


def test_a_pickle_that_would_run_something_is_refused(
    checkpoints: Path, one_rank: Mesh, tmp_path: Path
) -> None:
    """C7: megatron would have run it."""

    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    folder = tmp_path / "learner"
    shutil.copytree(checkpoints / "plain" / "learner", folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Runs()))
    learner = new_learner(checkpoints / "model", one_rank, ADAMW)
    with pytest.raises(ValueError, match=r"it would run posix\.system"):
        load_learner(folder, learner)
    with pytest.raises(ValueError, match=r"it would run posix\.system"):
        load_model(folder, learner.chunks)
    assert not (tmp_path / "ran").exists()


def test_a_folder_appears_whole(one_rank: Mesh, tmp_path: Path) -> None:
    target = tmp_path / "checkpoints" / "step_000007"
    run = RunFolder(tmp_path)
    with committed_folder(target, one_rank) as partial:
        (partial / "file").write_text("all of it")
        assert not target.exists()
        assert run.last_checkpoint() is None
    assert run.last_checkpoint() == target
    assert [path.name for path in target.parent.iterdir()] == ["step_000007"]
    assert (target / "file").read_text() == "all of it"


def test_a_half_written_checkpoint_is_never_the_last(one_rank: Mesh, tmp_path: Path) -> None:
    """A crash leaves it under another name, and the next one to be written clears it away."""
    run = RunFolder(tmp_path)
    whole = tmp_path / "checkpoints" / "step_000002"
    whole.mkdir(parents=True)
    left = tmp_path / "checkpoints" / "step_000004.partial"
    (left / "learner").mkdir(parents=True)
    assert run.last_checkpoint() == whole
    with committed_folder(tmp_path / "checkpoints" / "step_000004", one_rank) as partial:
        assert list(partial.iterdir()) == []
    assert run.last_checkpoint() == tmp_path / "checkpoints" / "step_000004"
    assert not left.exists()


def test_a_failure_leaves_the_checkpoint_before(one_rank: Mesh, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    whole = tmp_path / "checkpoints" / "step_000002"
    whole.mkdir(parents=True)
    with (
        pytest.raises(OSError, match="no room"),
        committed_folder(tmp_path / "checkpoints" / "step_000004", one_rank) as partial,
    ):
        (partial / "file").write_text("half of it")
        raise OSError("no room")
    assert run.last_checkpoint() == whole
    assert list((tmp_path / "checkpoints").iterdir()) == [whole]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for version in (2, 10, 4, 6):
        (tmp_path / "checkpoints" / f"step_{version:06d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000012.partial").mkdir()
    run.drop_old_checkpoints(2)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_000006", "step_000010", "step_000012.partial"]
