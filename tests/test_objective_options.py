"""What can be optimised beside the policy gradient, as a user meets it: configs and one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_gmc.cli import main
from tests.models import save_tiny_model
from tests.runs import records, train_tree, write_config

pytestmark = pytest.mark.usefixtures("own_world")


@pytest.fixture
def config(task: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path / "train.yaml", train_tree(task, tmp_path / "run"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--objective.kl.coefficient", "0"], "objective.kl.coefficient"),
        (["--objective.entropy_coefficient", "-0.1"], "objective.entropy_coefficient"),
        (["--objective.mismatch.name", "clip"], "objective.mismatch"),
        (
            ["--objective.mismatch.name", "mask", "--objective.mismatch.cap", "2"],
            "objective.mismatch",
        ),
        (
            ["--objective.mismatch.name", "truncate", "--estimator.name", "grpo"],
            "objective.mismatch: truncate is a factor for the weights of whole trajectories, and "
            "estimator grpo weights each token",
        ),
    ],
)
def test_an_objective_that_cannot_be_meant(
    config: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_reference_of_another_architecture(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before the engine starts, by the field's name."""
    other = save_tiny_model(tmp_path / "other", "qwen2", tied=True)
    words = ["--objective.kl.coefficient", "0.1", "--objective.kl.reference", str(other)]
    assert main(["train", str(config), *words]) == 2
    assert "objective.kl.reference" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_with_every_term(config: Path, tmp_path: Path) -> None:
    """At version 0 the policy is the reference, to the bit; later it is not."""
    words = ["--train.steps", "3", "--optim.warmup_steps", "0", "--evaluation.prompts", "1"]
    words += ["--objective.kl.coefficient", "0.1", "--objective.entropy_coefficient", "0.01"]
    words += ["--objective.mismatch.name", "truncate"]
    assert main(["train", str(config), *words]) == 0
    steps = records(tmp_path / "run")
    assert steps[1]["reference/k3_kl"] == 0
    assert steps[2]["reference/k3_kl"] > 0
    for step in (1, 2, 3):
        assert 0 < steps[step]["entropy/mean"] < 10
        assert steps[step]["step/left_out_share"] == 0
    # Engine against learner at lag 0, and the lag's part after it.
    assert abs(steps[1]["mismatch/kl"]) < 1e-4 < abs(steps[3]["mismatch/kl"])


def test_a_run_without_any_signal(config: Path, tmp_path: Path) -> None:
    """Every group is left out of every step; the run goes on to its end and says so."""
    words = ["--train.steps", "2", "--optim.warmup_steps", "0", "--evaluation.prompts", "1"]
    words += ["--task.grader.path", "tests.reward:nothing"]
    assert main(["train", str(config), *words]) == 0
    for step in (1, 2):
        metrics = records(tmp_path / "run")[step]
        assert (metrics["step/left_out_share"], metrics["grad_norm"], metrics["loss"]) == (1, 0, 0)
        assert metrics["lag/max"] == step - 1
    assert json.loads((tmp_path / "run" / "result.json").read_text())["retained_mass"] is None
