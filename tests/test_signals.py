"""Runs that are asked to stop: a checkpoint, the code for requeueing, and nothing lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_gmc.failures import EXIT_REQUEUE
from megatron_gmc.manifest import fault_of
from megatron_gmc.run_folder import RunFolder
from megatron_gmc.signals import SAME_WARNING_S
from tests.distributed import ROOT
from tests.runs import (
    TIMEOUT_S,
    assert_same_weights,
    engine_of,
    environment,
    records,
    start_ranks,
    train_tree,
    wait_until,
    write_config,
)

STEPS = 6
# One rank's word reaches rank 0 within a beat or two.
HEARD_S = 3.0


def stop_tree(task: Path, run: Path, **changes: dict[str, object]) -> dict[str, object]:
    """The small run with no checkpoint of its own before the last: a stop writes the first."""
    return train_tree(task, run, train={"save_every": None, "resume": "auto"}, **changes)


def past_step(run: Path, step: int) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and f'"step": {step},' in metrics.read_text()


def test_one_of_two_ranks_is_asked_to_stop(task: Path, meshes: Path, tmp_path: Path) -> None:
    """D1: both stop before the same step; the same command then ends as if nothing had been.

    The engine is held for a while, so that the signal finds the run waiting for samples. SLURM
    sends its warning, SIGUSR1, to the engine as well.
    """
    run = tmp_path / "run"
    tree = stop_tree(task, run, mesh={"tensor": 2})
    config = write_config(tmp_path / "train.yaml", tree)
    ranks = start_ranks(2, tmp_path / "first", "train", config)
    wait_until(lambda: past_step(run, 1), ranks)
    engine = engine_of(ranks[0])
    engine.send_signal(signal.SIGUSR1)
    engine.suspend()
    ranks[1].send_signal(signal.SIGUSR1)
    time.sleep(HEARD_S)
    engine.resume()
    assert [one.wait(timeout=TIMEOUT_S) for one in ranks] == [EXIT_REQUEUE, EXIT_REQUEUE]
    said = " ".join((tmp_path / "first.rank0").read_text().split())
    (checkpoint,) = (run / "checkpoints").iterdir()
    version = int(checkpoint.name.removeprefix("step_"))
    assert 1 <= version < STEPS
    assert f"stopped before step {version} by SIGUSR1 to rank 1; " in said
    assert not (run / "result.json").exists()

    ranks = start_ranks(2, tmp_path / "second", "train", config)
    assert [one.wait(timeout=TIMEOUT_S) for one in ranks] == [0, 0]
    assert_same_weights(run, meshes / "tensor")
    assert records(run) == records(meshes / "tensor")


def test_torchrun_hands_the_warning_on(task: Path, tmp_path: Path) -> None:
    """torchrun names the signal in its own words and code; the run's checkpoint is there."""
    run = tmp_path / "run"
    config = write_config(tmp_path / "train.yaml", stop_tree(task, run, mesh={"tensor": 2}))
    words = ["--nproc_per_node", "2", "--signals-to-handle", "SIGTERM,SIGUSR1", "--standalone"]
    with (tmp_path / "said").open("wb") as output:
        torchrun = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", *words),
                *("-m", "megatron_gmc", "train", str(config)),
            ],
            env=environment(),
            cwd=ROOT,
            stdout=output,
            stderr=output,
        )
    wait_until(lambda: past_step(run, 1), [torchrun])
    torchrun.send_signal(signal.SIGUSR1)
    assert torchrun.wait(timeout=TIMEOUT_S) == 1
    said = (tmp_path / "said").read_text()
    assert "stopped before step" in said
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.name.startswith("step_00000")


def test_a_second_signal_ends_at_once(task: Path, tmp_path: Path) -> None:
    """Nothing is waited for any more; what was committed before stays, and nothing is half there.

    The engine is held, so that the checkpoint that the first signal asks for never comes.
    """
    run = tmp_path / "run"
    tree = train_tree(task, run, train={"steps": 10_000, "keep_checkpoints": 1})
    config = write_config(tmp_path / "train.yaml", tree)
    (rank,) = start_ranks(1, tmp_path / "log", "train", config)
    wait_until(lambda: RunFolder(run).last_checkpoint() is not None, [rank])
    engine = engine_of(rank)
    engine.suspend()
    try:
        rank.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(timeout=SAME_WARNING_S + 1)
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        engine.kill()
    assert "rank 0: a second signal, SIGTERM: ends at once" in (tmp_path / "log.rank0").read_text()
    newest = RunFolder(run).last_checkpoint()
    assert newest is not None
    assert fault_of(newest) is None
