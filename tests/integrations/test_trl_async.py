"""TRL's asynchronous trainer with weights: gradients on one rank and two, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_gmc.estimators import GRPO
from megatron_gmc.integrations.trl_async import AsyncGMCTrainer
from tests.distributed import run_ranks
from tests.integrations.trl_async_runs import STEPS, build, save_policy


@pytest.fixture(scope="module")
def policy(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(task, tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_gradient_is_the_formulas(policy: Path, tmp_path: Path, ranks: int) -> None:
    """Three groups of four a step, over one rank or two; masses from 70 to 80,000."""
    run_ranks("tests.integrations.trl_async_runs", "run", ranks, str(policy), str(tmp_path))
    for rank in range(ranks):
        result: dict[str, Any] = json.loads((tmp_path / f"{ranks}.rank{rank}.json").read_text())
        assert len(result["steps"]) == STEPS
        assert max(step["error"] for step in result["steps"]) < 1e-6
        logged = [entry["ratio/mass_mean"] for entry in result["log"]]
        assert logged == pytest.approx([step["mass"] for step in result["steps"]], rel=1e-5)
        assert all(entry["clip_ratio/region_mean"] == 0 for entry in result["log"])
        assert all(0 < entry["ratio/capped_share"] <= 1 for entry in result["log"])


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("token_budget", 256, "token_budget: must be 0"),
        ("per_device_train_batch_size", 6, r"per_device_train_batch_size: .* \(4\), got 6"),
        ("top_p", 0.9, "top_p: must be 1, got 0.9"),
    ],
)
def test_what_does_not_go_with_the_weights_is_refused(
    policy: Path, tmp_path: Path, setting: str, value: object, message: str
) -> None:
    """T9, and settings that cut groups between micro-batches."""
    with pytest.raises(ValueError, match=message):
        build(policy, tmp_path, **{setting: value})


def test_a_method_that_is_no_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="estimator: grpo is not one weight a trajectory"):
        AsyncGMCTrainer(estimator=GRPO())
