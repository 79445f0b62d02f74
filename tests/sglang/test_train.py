"""The whole command on real servers: disaggregated over each transport, and colocated."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gmc.metrics import read_metrics
from tests.runs import Tree, run_alone, train_tree, write_config
from tests.sglang.servers import PYTHON, need_sglang

pytestmark = pytest.mark.timeout(900)

RUNS: dict[str, tuple[Tree, Tree, int]] = {
    "distributed": ({"lag": {"bounded": 1}}, {"transport": "distributed", "bucket_mb": 1}, 1),
    "tensor": ({"lag": {"exact": 1}}, {"transport": "tensor"}, 1),
    "colocated": ({"lag": {"exact": 0}}, {}, 0),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_with_its_lag_kept_and_log_probs_that_agree(
    task: Path, tmp_path: Path, name: str
) -> None:
    need_sglang()
    rollout, weights, lag = RUNS[name]
    sglang: Tree = {"servers": 1, "python": str(PYTHON)}
    if name == "colocated":
        sglang["placement"] = "colocated"
    tree = train_tree(
        task,
        tmp_path / "run",
        train={"steps": 4},
        rollout={"engine": "sglang", "sglang": sglang, "start_timeout_s": 300.0, **rollout},
        weights=weights,
    )
    ended = run_alone("train", write_config(tmp_path / "train.yaml", tree))
    assert ended.returncode == 0, ended.stderr
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert max(value for _, value in metrics["lag/max"]) == lag
    mismatch = [value for _, value in metrics["ratio/log_ratio_sd_lag0"]]
    assert mismatch and max(mismatch) <= 1e-4
    assert not [name for name in metrics if name.startswith("rollout/refused")]
    assert not any(value for _, value in metrics.get("rollout/engine_faults", []))
