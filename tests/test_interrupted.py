"""Runs that end in the middle: what they say and leave, and that resuming hides it."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.parquet as parquet
import pytest
import yaml

from megatron_gmc.checkpoints import Checkpoints
from megatron_gmc.cli import main
from megatron_gmc.rollout.state import RolloutState
from tests.distributed import ROOT
from tests.runs import (
    TIMEOUT_S,
    assert_same_weights,
    command,
    completed,
    end_world,
    engine_of,
    environment,
    records,
    roll_back,
    run_alone,
    start_ranks,
    train_tree,
    wait_until,
    write_config,
)

pytestmark = pytest.mark.usefixtures("own_world")


@pytest.fixture
def config_file(task: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path / "train.yaml", train_tree(task, tmp_path / "run"))


def test_killed_and_resumed(task: Path, finished: Path, tmp_path: Path) -> None:
    """D2: inside warm-up; the resumed run is the uninterrupted one, bit by bit."""
    run = tmp_path / "run"
    config = write_config(tmp_path / "train.yaml", train_tree(task, run))
    kill_after_checkpoint(run, 1, "train", config)
    completed("train", config, "--resume")
    assert_same_weights(run, finished)
    assert records(run) == records(finished)


def kill_after_checkpoint(run: Path, world: int, *arguments: str | Path) -> None:
    """Start a command, kill its ranks once the step after a checkpoint is logged."""
    ranks = start_ranks(world, run.with_name("killed"), *arguments)

    def past_checkpoint() -> bool:
        checkpoint, metrics = run / "checkpoints" / "step_000002", run / "metrics.jsonl"
        return checkpoint.exists() and '"step": 3' in metrics.read_text()

    try:
        wait_until(past_checkpoint, ranks)
        helpers = psutil.Process(ranks[0].pid).children(recursive=True)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
    # The engine leads a session of its own, so that no signal reached it: it notices by itself.
    _, alive = psutil.wait_procs(helpers, timeout=60)
    assert alive == []


class Crash(BaseException):
    """Ends a run at a chosen place, past every handler."""


@pytest.mark.parametrize("moment", ["after the checkpoint", "after the last checkpoint"])
def test_crashed_between_two_writes(
    config_file: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The record has every step, whichever of checkpoint and metrics was written last."""
    version = 2 if moment == "after the checkpoint" else 6
    begin = Checkpoints.begin

    def save_and_crash(checkpoints: Checkpoints, rollout: RolloutState) -> None:
        begin(checkpoints, rollout)
        if checkpoints.newest == version:
            checkpoints.finish()
            raise Crash

    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr(Checkpoints, "begin", save_and_crash)
        main(["train", str(config_file)])
    end_world()
    completed("train", config_file, "--resume")
    run = config_file.parent / "run"
    assert_same_weights(run, finished)
    assert records(run) == records(finished)


def test_a_step_that_is_not_finite(
    config_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A step size beyond all reason: stopped before the next update, with the batch to look at."""
    words = ["--optim.lr", "1e30", "--optim.warmup_steps", "0", "--evaluation.every", "6"]
    assert main(["train", str(config_file), *words]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    suspects = tmp_path / "run" / "non_finite_step_1.parquet"
    assert said == (
        "error: step 1 was stopped before the optimizer: the gradient's norm is nan; "
        f"megatron-gmc inspect {suspects} shows it"
    )
    rows = parquet.read_table(suspects).to_pylist()
    assert len(rows) == 8
    for row in rows:
        lists = ("tokens", "log_probs", "behaviour_log_probs", "versions")
        assert len({len(row[name]) for name in lists}) == 1
        assert (row["step"], row["lag"]) == (1, 1)
        assert math.isnan(row["log_ratio"]) == any(map(math.isnan, row["log_probs"]))
    assert main(["inspect", str(suspects)]) == 0
    assert "the step was stopped before the optimizer" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert f"megatron-gmc inspect {suspects}" in "".join(capsys.readouterr().out.split("\n"))
    assert not (tmp_path / "run" / "result.json").exists()
    assert not (tmp_path / "run" / "huggingface").exists()


def test_nothing_left_to_do(
    task: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D3."""
    config = write_config(tmp_path / "train.yaml", train_tree(task, finished))
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    for words in (["train", str(config)], ["train", str(config), "--resume"]):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"nothing left to do: the run in {finished} has finished")
        assert "held-out accuracy after" in said
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_resume_with_other_prompts(
    task: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D4: the file has the same name and other lines."""
    run, prompts = tmp_path / "run", tmp_path / "prompts.jsonl"
    roll_back(finished, run, 4)
    lines = (task / "prompts.jsonl").read_text().splitlines()
    prompts.write_text("\n".join(reversed(lines)) + "\n")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["task"]["source"]["path"] = str(prompts)
    settings["train"]["output_dir"] = str(run)
    write_config(run / "config.yaml", settings)
    assert main(["train", str(run / "config.yaml"), "--resume"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --resume: the checkpoint was made with prompts '")
    assert said.endswith("resume with the same prompts or start a new run\n")
    assert len(said.splitlines()) == 1


def test_a_distributed_optimizer_resumes(meshes: Path) -> None:
    """D5: sharded moments and step count come back, bit by bit."""
    assert_same_weights(meshes / "data_resumed", meshes / "data")
    assert records(meshes / "data_resumed") == records(meshes / "data")


def test_two_ranks_killed_and_resumed(task: Path, meshes: Path, tmp_path: Path) -> None:
    """As under torchrun, at TP 2, inside warm-up."""
    run = tmp_path / "run"
    config = write_config(tmp_path / "train.yaml", train_tree(task, run, mesh={"tensor": 2}))
    kill_after_checkpoint(run, 2, "train", config)
    ranks = start_ranks(2, tmp_path / "resumed", "train", config, "--resume")
    try:
        codes = [rank.wait(TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], (tmp_path / "resumed.rank0").read_text()
    assert_same_weights(run, meshes / "tensor")
    assert records(run) == records(meshes / "tensor")


def test_an_engine_that_is_killed(config_file: Path, tmp_path: Path, finished: Path) -> None:
    """The run says so and ends; resumed, it ends as if nothing had happened."""
    run = tmp_path / "run"
    process = subprocess.Popen(
        command("train", config_file),
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    wait_until((run / "checkpoints" / "step_000002").exists, [process])
    engine = engine_of(process)
    engine.kill()
    _, errors = process.communicate(timeout=TIMEOUT_S)
    text = errors.decode()
    assert process.returncode == 1
    assert text.startswith(f"error: embedded engine (process {engine.pid}) was killed by signal 9")
    assert str(run / "engine.log") in text
    assert "--resume continues from the last checkpoint" in text
    assert len(text.splitlines()) == 1
    assert not (run / "result.json").exists()
    assert not (run / "huggingface").exists()

    completed("train", config_file, "--resume")
    assert_same_weights(run, finished)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for one checkpoint of the small run, and not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None:
        pytest.skip("no mount command, so no disk to fill")
    asked = [mount, "-t", "tmpfs", "-o", "size=2200k", "tmpfs", str(folder)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(config_file: Path, small_disk: Path, finished: Path) -> None:
    """The checkpoint before stays whole; with room, the run goes on from it."""
    run = small_disk / "run"
    words = ["train", str(config_file), "--train.output_dir", str(run)]
    full = run_alone(*words)
    assert full.returncode == 1
    *_, said = full.stderr.splitlines()
    assert said.startswith(f"error: cannot write {run}/")
    assert said.endswith(
        "(0 MiB are free there); make room, then start the command again, train with --resume"
    )
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]
    assert not (run / "result.json").exists()
    assert not (run / "huggingface").exists()

    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    completed(*words, "--resume")
    assert_same_weights(run, finished)
