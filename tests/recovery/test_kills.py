"""D1 in short: kills during the writing of a checkpoint and anywhere, and nothing is lost.

The ten kills in a row are `python -m tests.recovery.kills`.
"""

from __future__ import annotations

from pathlib import Path

from tests.recovery.kills import KINDS, Kill, ledger, random_kills, run_with_kills
from tests.runs import assert_same_weights, records, train_tree, write_config


def test_killed_while_writing_and_later(task: Path, meshes: Path, tmp_path: Path) -> None:
    """Rank 0 dies in the middle of a checkpoint, rank 1 later; a grader's worker in between."""
    run = tmp_path / "run"
    tree = train_tree(task, run, train={"resume": "auto"}, mesh={"tensor": 2})
    config = write_config(tmp_path / "train.yaml", tree)
    kills = [Kill("checkpoint", 1), Kill("grader worker", 0), Kill("rank 1", 1)]
    assert len(run_with_kills(config, run, kills)) == 3
    times = ledger(run, steps=6)
    assert sorted(times.values()) == [1] * 12
    assert_same_weights(run, meshes / "tensor")
    assert records(run) == records(meshes / "tensor")


def test_every_kind_is_drawn() -> None:
    kinds = [kill.kind for kill in random_kills(10, seed=3)]
    assert set(kinds) == set(KINDS)
    assert kinds != [kill.kind for kill in random_kills(10, seed=4)]
