"""Methods whose weights depend on the whole batch: their plan, their passes, their limits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gmc.cli import main
from megatron_gmc.config import LearnerConfig, ObjectiveConfig
from megatron_gmc.estimators import ESTIMATORS
from megatron_gmc.learner.batch import Batch
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.plan import Limits, Passes, Plan, plan_micro_batches
from megatron_gmc.learner.policy_step import Objective, policy_step
from tests.learner.steps import ADAMW, new_learner, random_rows
from tests.runs import train_tree, write_config


def plan(size: int, *, data_size: int, token_limit: int, passes: Passes = "auto") -> Plan:
    """Groups of two, ten tokens each."""
    return plan_micro_batches(
        torch.full((2 * size,), 10),
        torch.arange(size).repeat_interleave(2),
        limits=Limits(data_size=data_size),
        token_limit=token_limit,
        scope="batch",
        passes=passes,
    )


@given(
    size=st.integers(1, 5),
    data_size=st.integers(1, 3),
    rows=st.integers(1, 12),
    passes=st.sampled_from(["auto", "two_pass"]),
)
def test_one_pass_takes_the_whole_batch_at_once(
    size: int, data_size: int, rows: int, passes: Passes
) -> None:
    cut = plan(size, data_size=data_size, token_limit=10 * rows, passes=passes)
    # One group is not parted, so that its rank has all of it whatever the others have.
    at_once = (data_size == 1 or size == 1) and 2 * size <= rows
    assert cut.two_pass == (not at_once or passes == "two_pass")
    filled = [one for rank in cut.micro_batches for one in rank if one]
    assert not at_once or filled == [tuple(range(2 * size))]


@pytest.mark.parametrize(("data_size", "token_limit"), [(2, 40), (1, 39)])
def test_one_pass_is_refused_where_it_would_be_wrong(data_size: int, token_limit: int) -> None:
    assert not plan(2, data_size=1, token_limit=40, passes="single_pass").two_pass
    with pytest.raises(ValueError, match=r"learner.passes: single_pass needs the whole batch"):
        plan(2, data_size=data_size, token_limit=token_limit, passes="single_pass")


@pytest.mark.parametrize("method", ["m2po", "gmc_pooled", "gepo", "icepop", "mis"])
def test_both_ways_report_the_same(method: str, folder: Path, mesh: Mesh) -> None:
    """S3: the metrics of one micro-batch and of one trajectory at a time."""
    batch = Batch.from_rows(random_rows(3, groups=4, group_size=3))
    objective = Objective(ESTIMATORS[method](), ObjectiveConfig(), 1.0)
    metrics = [
        policy_step(
            new_learner(folder, mesh, ADAMW),
            batch,
            objective,
            LearnerConfig(micro_batch_tokens=limit),
        )
        for limit in (4096, 16)
    ]
    passes = [one.pop("step/two_pass") for one in metrics]
    assert passes == [0.0, float(ESTIMATORS[method].scope != "trajectory")]
    assert metrics[0]["ratio/clip_frac"] == metrics[1]["ratio/clip_frac"]
    assert (metrics[0]["ratio/clip_frac"] > 0) == (method != "gmc_pooled")
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("ranks", "limit", "message"),
    [
        ("1", "84", "single_pass needs a whole batch in a micro-batch, up to"),
        (
            "2",
            "100000",
            "estimator m2po looks at the whole batch, which 2 data-parallel ranks share",
        ),
    ],
)
def test_one_pass_is_refused_before_a_model_is_built(
    ranks: str,
    limit: str,
    message: str,
    task: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    config = write_config(tmp_path / "train.yaml", train_tree(task, tmp_path / "run"))
    words = ["--estimator.name", "m2po", "--learner.passes", "single_pass"]
    assert main(["train", str(config), *words, "--learner.micro_batch_tokens", limit]) == 2
    assert message in capsys.readouterr().err
