"""Rendered jobs on a real two-node SLURM: they train, are warned, come back, and are cancelled."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.cluster import cluster, missing
from tests.launch.jobs import TIMEOUT_S, logs, state, steps_of, submit, wait_for
from tests.runs import (
    assert_same_weights,
    environment,
    make_task,
    start_ranks,
    train_tree,
    trajectories,
    write_config,
)

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which sbatch and its like talk to the cluster."""
    with cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield environment() | {"SLURM_CONF": found["SLURM_CONF"]}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


def test_a_warned_job_comes_back_and_loses_nothing(
    task: Path, commands: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes, a tensor rank on each: USR1 before the limit, requeue, the end; as if unwarned."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    changes = {"train": {"steps": 12, "save_trajectories": 1}, "mesh": {"tensor": 2}}
    config = write_config(tmp_path / "train.yaml", train_tree(task, run, **changes))
    job = submit(tmp_path, config, commands)

    def said() -> str:
        return f"{state(job, commands)}\n{logs(tmp_path)}"

    wait_for(lambda: steps_of(run) >= 3, said)
    subprocess.run(["scancel", "--signal=USR1", job], env=commands, check=True)
    wait_for(lambda: state(job, commands)["Restarts"] == "1", said)
    before = steps_of(run)
    assert before < 12, said()
    # SLURM lets a requeued job wait for two minutes; a few seconds it needs.
    subprocess.run(
        ["scontrol", "update", f"JobId={job}", "StartTime=now+5seconds"], env=commands, check=True
    )
    wait_for(lambda: state(job, commands)["JobState"] == "COMPLETED", said)
    # Every step's groups exactly once: in exact mode P groups a step, numbered from 0.
    rows = [row for step in range(12) for row in trajectories(run, step)]
    assert Counter(row["group"] for row in rows) == dict.fromkeys(range(12 * 2), 4), said()
    calm = tmp_path / "calm"
    alone = write_config(tmp_path / "calm.yaml", train_tree(task, calm, **changes))
    ranks = start_ranks(2, tmp_path / "calm.log", "train", alone)
    assert [rank.wait(timeout=TIMEOUT_S) for rank in ranks] == [0, 0]
    assert_same_weights(run, calm)


def test_a_cancelled_job_saves_and_stays_away(
    task: Path, commands: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    tree = train_tree(task, run, train={"steps": 500, "save_every": 500})
    job = submit(tmp_path, write_config(tmp_path / "train.yaml", tree), commands, nodes=1)

    def said() -> str:
        return f"{state(job, commands)}\n{logs(tmp_path)}"

    wait_for(lambda: steps_of(run) >= 2, said)
    subprocess.run(["scancel", job], env=commands, check=True)
    wait_for(lambda: state(job, commands)["JobState"] == "CANCELLED", said)
    wait_for(lambda: any((run / "checkpoints").glob("step_*[0-9]")), said)
    assert state(job, commands)["Restarts"] == "0"
