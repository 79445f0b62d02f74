"""Which checkpoint a run goes on from, and what it does with a damaged one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from megatron_gmc.cli import main
from tests.runs import assert_same_weights, completed, end_world, records, train_tree, write_config

pytestmark = pytest.mark.usefixtures("own_world")


def stopped_after(finished: Path, run: Path, *versions: int) -> None:
    """Copy a finished run as one that was killed when it had just these checkpoints."""
    shutil.copytree(finished, run)
    for name in ("result.json", "plot.png"):
        (run / name).unlink()
    shutil.rmtree(run / "huggingface")
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) not in versions:
            shutil.rmtree(path)


def cut_off(checkpoint: Path) -> None:
    record = checkpoint / "rollout" / "rollout.json"
    os.truncate(record, record.stat().st_size // 2)


def one_bit(checkpoint: Path) -> None:
    file = checkpoint / "learner" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def missing(checkpoint: Path) -> None:
    (checkpoint / "learner" / ".metadata").unlink()


def test_a_damaged_checkpoint_is_passed_over(task: Path, finished: Path, tmp_path: Path) -> None:
    """D1, D2: by name, for the one before; the end is that of the run nothing interrupted."""
    run, fault = tmp_path / "run", "learner/__0_0.distcp holds other bytes than were written"
    stopped_after(finished, run, 2, 4)
    one_bit(run / "checkpoints" / "step_000004")
    config = write_config(tmp_path / "train.yaml", train_tree(task, run))
    output = " ".join(completed("train", config, "--resume").split())
    assert (
        f"step_000004 is damaged: {fault}; it is kept as step_000004.damaged goes on from "
        "step_000002"
    ) in output
    (resumed,) = [json.loads(line) for line in (run / "resumes.jsonl").read_text().splitlines()]
    assert resumed["from"] == "step_000002"
    assert resumed["refused"] == [f"step_000004 is damaged: {fault}"]
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000004", "step_000004.damaged", "step_000006"]
    assert_same_weights(run, finished)
    assert records(run) == records(finished)


def test_no_good_checkpoint_is_left(
    task: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Starting anew would throw finished work away, so it is not done unasked."""
    run = tmp_path / "run"
    stopped_after(finished, run, 2, 4)
    missing(run / "checkpoints" / "step_000002")
    cut_off(run / "checkpoints" / "step_000004")
    config = write_config(tmp_path / "train.yaml", train_tree(task, run))
    for words in (["--resume"], ["--train.resume", "auto"]):
        assert main(["train", str(config), *words]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(
            f"error: train.output_dir: no checkpoint of the run in {run} can be used: step_000004 "
            "is damaged: rollout/rollout.json has "
        )
        assert "; step_000002 is damaged: learner/.metadata is missing; remove" in said
        end_world()


def test_auto_starts_and_goes_on(task: Path, finished: Path, tmp_path: Path) -> None:
    """D3: the same command starts the run, goes on with it, and says when nothing is left."""
    run = tmp_path / "run"
    words = ["train", "", "--train.resume", "auto"]
    words[1] = str(write_config(tmp_path / "train.yaml", train_tree(task, run)))
    stopped_after(finished, run, 4)
    (run / "checkpoints" / "step_000006.partial").mkdir()
    assert "goes on from step_000004" in completed(*words)
    assert not (run / "checkpoints" / "step_000006.partial").exists()
    assert_same_weights(run, finished)
    assert completed(*words).startswith("nothing left to do")


def test_auto_without_a_checkpoint(task: Path, finished: Path, tmp_path: Path) -> None:
    """A run killed before its first checkpoint starts from its beginning."""
    run = tmp_path / "run"
    stopped_after(finished, run)
    words = ["train", "", "--train.resume", "auto"]
    words[1] = str(write_config(tmp_path / "train.yaml", train_tree(task, run)))
    output = " ".join(completed(*words).split())
    assert "goes on from its beginning, since it has no checkpoint" in output
    assert_same_weights(run, finished)
    assert records(run) == records(finished)
