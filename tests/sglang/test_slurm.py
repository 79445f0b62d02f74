"""A job with a node for the learner and one for a SGLang server, on a real SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gmc.metrics import read_metrics
from tests.launch.cluster import cluster, missing
from tests.launch.jobs import logs, state, submit, wait_for
from tests.runs import environment, make_task, train_tree, write_config
from tests.sglang.servers import PYTHON, need_sglang


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_an_engine_node_serves_the_learner_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Address and keys are the job's own; the samples carry the versions that they should."""
    need_sglang()
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    engine = {"engine": "sglang", "sglang": {"servers": 1, "python": str(PYTHON)}}
    tree = train_tree(make_task(tmp_path / "task"), run, rollout=engine | {"start_timeout_s": 180})
    config = write_config(tmp_path / "train.yaml", tree)
    with cluster(tmp_path / "cluster") as found:
        commands = environment() | {"SLURM_CONF": found["SLURM_CONF"]}
        job = submit(tmp_path, config, commands, nodes=1, engine_nodes=1)
        ended = ("COMPLETED", "FAILED", "CANCELLED")

        def said() -> str:
            return f"{state(job, commands)}\n{logs(tmp_path)}"

        wait_for(lambda: state(job, commands)["JobState"] in ended, said)
        assert state(job, commands)["JobState"] == "COMPLETED", said()
    metrics = read_metrics(run / "metrics.jsonl")
    assert [value for _, value in metrics["lag/max"]] == [0, 1, 2, 2, 2, 2]
    assert all(value < 1e-4 for _, value in metrics["ratio/log_ratio_sd_lag0"])
    secrets = [text for text in (tmp_path / "job.sh").read_text().split() if "API_KEY=" in text]
    assert all("python3" in text or "$(" in text for text in secrets)
