"""A sweep of real runs: one finishes, one fails, and what starting it again does."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_gmc.cli import main
from megatron_gmc.report_command import runs_in
from megatron_gmc.run_folder import RunFolder
from tests.browser import Open, drawn
from tests.distributed import ROOT
from tests.runs import environment, train_tree, write_config


def write_sweep(task: Path, folder: Path) -> Path:
    """One run on the task's policy and one on a policy that is missing."""
    tree = train_tree(
        task, folder / "unused", train={"steps": 2, "save_every": 1}, evaluation={"prompts": 2}
    )
    base = write_config(folder / "train.yaml", tree)
    shutil.copytree(task / "policy", folder / "good")
    grid = {"policy.path": [str(folder / "good"), str(folder / "late")]}
    sweep = {"output_dir": str(folder / "sweep"), "base": str(base), "grids": [grid]}
    return write_config(folder / "sweep.yaml", {**sweep, "slurm": {"time": "01:00:00"}})


@pytest.fixture(scope="module")
def swept(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swept")
    config = write_sweep(task, folder)
    assert main(["sweep", str(config), "--slurm"]) == 0
    assert main(["sweep", str(config), "--jobs", "2"]) == 1
    return folder


def named(folder: Path, end: str) -> RunFolder:
    (found,) = (folder / "sweep" / "configs").glob(f"*{end}.yaml")
    return RunFolder(folder / "sweep" / "runs" / found.stem)


def test_one_failure_does_not_stop_the_others(swept: Path) -> None:
    assert named(swept, "good").finished() and not named(swept, "late").finished()
    results = json.loads((swept / "sweep" / "results.json").read_text())
    (run,) = results["runs"]
    assert run["seed"] == 0 and run["lag"] == "2 (exact)" and len(run["accuracy"]) == 2
    assert results["cells"][0]["finished"] == 1
    assert runs_in(swept / "sweep") == [named(swept, "good").path]


def test_an_array_job_does_what_the_sweep_does(swept: Path) -> None:
    """The script of both runs, run by bash as SLURM would: one has finished, one is faulty."""
    script = swept / "sweep" / "sweep.sbatch"
    text = script.read_text()
    assert "#SBATCH --array=0-1%1\n" in text and "#SBATCH --time=01:00:00\n" in text

    def run(place: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(script)],
            env=environment() | {"SLURM_ARRAY_TASK_ID": str(place)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    done, faulty = run(0), run(1)
    assert done.returncode == 0 and "nothing left to do" in done.stdout, done.stderr
    assert faulty.returncode == 2 and "policy.path" in faulty.stderr


def test_started_again_it_lists_failures_and_repeats_nothing(
    swept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = named(swept, "good").result
    before = result.stat().st_mtime_ns
    assert main(["sweep", str(swept / "sweep.yaml")]) == 1
    out = capsys.readouterr().out
    assert "2 runs in" in out and "1 finished, 1 failed, 0 waiting" in out
    assert "failed, exit code 2: error: policy.path:" in out
    assert result.stat().st_mtime_ns == before


def test_another_config_does_not_mix_in(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(swept / "sweep.yaml"), "--fixed", "{optim.lr: 0.5}"]) == 2
    assert "with another config" in capsys.readouterr().err
    assert main(["sweep", str(swept / "sweep.yaml"), "--jobs", "0"]) == 2
    assert "--jobs must be at least 1, got 0" in capsys.readouterr().err


def test_failed_runs_are_retried_on_demand_and_cut_off_ones_go_on(
    swept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run as a kill after its first checkpoint leaves it; the first is untouched."""
    shutil.copytree(swept / "good", swept / "late")
    assert main(["sweep", str(swept / "sweep.yaml"), "--retry-failed"]) == 0
    late = named(swept, "late")
    assert late.finished()
    late.result.unlink()
    shutil.rmtree(late.huggingface)
    shutil.rmtree(late.checkpoints / "step_000002")
    lines = late.metrics.read_text().splitlines(keepends=True)
    capsys.readouterr()
    assert main(["sweep", str(swept / "sweep.yaml")]) == 0
    assert "1 finished, 0 failed, 1 waiting" in capsys.readouterr().out
    assert late.finished()
    # It went on from version 1: the old lines stand, and step 2 stands a second time.
    resumed = late.metrics.read_text().splitlines(keepends=True)
    assert resumed[: len(lines)] == lines
    assert {json.loads(line)["step"] for line in resumed[len(lines) :]} == {2}


def test_its_report_opens_in_a_browser(swept: Path, opened: Open) -> None:
    """After the tests above both runs have finished."""
    assert main(["report", str(swept / "sweep")]) == 0
    page = opened(swept / "sweep" / "report.html")
    assert "2 of 2 runs" in (page.locator("#shown").text_content() or "")
    figures = page.locator("figure")
    assert figures.count() == drawn(page) >= 16
    for place in range(figures.count()):
        assert figures.nth(place).locator("svg .mark-group path").count() > 0
