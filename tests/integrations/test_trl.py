"""TRL's own trainer on a tiny Qwen3: every accumulated gradient, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_gmc.estimators import GRPO
from megatron_gmc.integrations import hosts
from megatron_gmc.integrations.hosts import HostError, check_signature, check_version
from tests.distributed import run_ranks
from tests.integrations import trl_runs
from tests.integrations.trl_runs import CASES, build

ONE_RANK = ["lag0", "lag4", "slices", "trajectory_mean", "token_mean"]


@pytest.fixture(scope="module")
def records(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank wrote, by case."""
    folder = tmp_path_factory.mktemp("trl")
    for ranks, names in ((1, ONE_RANK), (2, ["straddling"])):
        run_ranks("tests.integrations.trl_runs", "run", ranks, str(task), str(folder), *names)
    return {
        name: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.rank*.json"))]
        for name in CASES
    }


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_is_the_formulas(records: dict[str, list[Any]], name: str) -> None:
    """S1, S2: several slices, iterations and ranks, groups over both ranks."""
    assert len(records[name]) == (2 if name == "straddling" else 1)
    for rank in records[name]:
        assert len(rank["steps"]) == CASES[name].steps
        assert max(step["error"] for step in rank["steps"]) < 1e-6


@pytest.mark.parametrize("name", CASES)
def test_logged_masses_are_the_formulas(records: dict[str, list[Any]], name: str) -> None:
    for rank in records[name]:
        logged = [entry["ratio/mass_mean"] for entry in rank["log"]]
        assert logged == pytest.approx([step["mass"] for step in rank["steps"]], rel=1e-5)


def test_the_lag_is_what_was_asked_for(records: dict[str, list[Any]]) -> None:
    """L1, L4: at lag 0 every ratio is 1; each optimizer step on one generation adds one."""
    lags = {
        name: [entry["lag/mean"] for entry in ranks[0]["log"]] for name, ranks in records.items()
    }
    assert lags["lag0"] == [0] * 6
    assert lags["lag4"] == [0, 1, 2, 3, 4, 4]
    assert lags["slices"] == [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]
    lag0 = records["lag0"][0]["log"]
    assert max(entry["ratio/log_ratio_sd"] for entry in lag0) < 1e-5
    assert all(entry["ratio/capped_share"] == 0 for entry in lag0)
    capped = [entry["ratio/capped_share"] for entry in records["slices"][0]["log"]]
    assert max(capped) > 0, "no group was capped, so the gradients showed nothing of the cap"


def test_trls_own_ratio_is_one(records: dict[str, list[Any]]) -> None:
    for ranks in records.values():
        assert all(entry["clip_ratio/region_mean"] == 0 for entry in ranks[0]["log"])


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("top_p", 0.9, "top_p: must be 1, got 0.9"),
        ("top_k", 20, "top_k: must be 0, got 20"),
        ("generation_kwargs", {"top_p": 0.5}, r"top_p: must be 1, got 0\.5"),
        ("repetition_penalty", 1.1, "repetition_penalty: must be 1"),
        ("off_policy_mask_threshold", 0.1, "off_policy_mask_threshold: must be None"),
        ("loss_type", "cispo", r"loss_type: must be one of dr_grpo \(token sum.*got cispo"),
        ("delta", 1.5, "delta: must be None"),
        ("beta", 0.1, "beta: must be 0"),
        ("mask_truncated_completions", True, "mask_truncated_completions: must be False"),
        ("rollout_func", None, "rollout_func: needed"),
        ("estimator", GRPO(), "estimator: grpo is not one weight a trajectory"),
    ],
)
def test_what_does_not_go_with_the_weights_is_refused(
    task: Path, tmp_path: Path, setting: str, value: object, message: str
) -> None:
    """T9, and the host's own corrections: before training starts, by name."""
    with pytest.raises(ValueError, match=message):
        build(task, tmp_path, CASES["lag0"], **{setting: value})


@pytest.mark.parametrize(
    ("log_probs", "message"),
    [
        (None, "brought no behaviour log-probs"),
        ([-1.0], r"completion 0 has 2 tokens and 1 behaviour log-probs"),
        ([-1.0, None], "completion 0 has a behaviour log-prob that is missing"),
        ([-1.0, math.nan], "completion 0 has a behaviour log-prob that is missing"),
    ],
)
def test_missing_behaviour_log_probs_are_refused(
    task: Path, tmp_path: Path, log_probs: list[float] | None, message: str
) -> None:
    """T6: TRL pads what is missing with log-prob 0."""

    def rollout(prompts: list[str], trainer: object) -> dict[str, Any]:
        rows = len(prompts)
        values = None if log_probs is None else [log_probs] * rows
        ids = [[1, 2]] * rows
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": values}

    with pytest.raises(ValueError, match=message):
        build(task, tmp_path, CASES["lag0"], rollout_func=rollout).train()


def test_untried_versions_and_signatures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_version("trl", ("1.16",))
    with pytest.raises(HostError, match=r"trl 1\.16\.\d+ was not tried with .*; tried: 1\.1\."):
        check_version("trl", ("1.1",))
    monkeypatch.setenv(hosts.UNTRIED, "verl,trl")
    check_version("trl", ("1.1",))
    with pytest.raises(HostError, match=r"no-such-host is not installed; .* no-such-host 2"):
        check_version("no-such-host", ("2",))
    with pytest.raises(HostError, match=r"trl 1\.16\..*: reward_of\(ids\) has no parameter mask"):
        check_signature("trl", trl_runs.reward_of, ("ids", "mask"))
