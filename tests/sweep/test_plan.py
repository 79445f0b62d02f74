"""Which runs a sweep stands for, how they are named, and what is refused before any starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_gmc.errors import ConfigError
from megatron_gmc.settings import load_config
from megatron_gmc.sweep.config import SweepConfig, planned_runs, run_name
from megatron_gmc.sweep.local import core_sets
from tests.distributed import ROOT
from tests.runs import train_tree, write_config

EXAMPLES = ROOT / "examples" / "arithmetic_cpu"


def planned(folder: Path, *grids: dict[str, object], **fields: object) -> SweepConfig:
    base = write_config(folder / "train.yaml", train_tree(Path("task"), folder / "unused"))
    tree = {"output_dir": str(folder / "sweep"), "base": str(base), "grids": list(grids), **fields}
    return load_config(SweepConfig, write_config(folder / "sweep.yaml", tree))


def test_a_grid_is_every_combination(tmp_path: Path) -> None:
    grid = {"rollout.lag.exact": [0, 4], "optim.lr": [1e-3, 3e-4], "train.seed": [0, 1, 2]}
    sweep = planned(tmp_path, grid, {"train.seed": [7]}, fixed={"train.steps": 8})
    runs = planned_runs(sweep)
    found = {
        (run.config.rollout.lag.exact, run.config.optim.lr, run.config.train.seed) for run in runs
    }
    wanted = {(lag, lr, seed) for lag in (0, 4) for lr in (1e-3, 3e-4) for seed in (0, 1, 2)}
    assert len(runs) == 13 and found == wanted | {(2, 1e-3, 7)}
    assert {run.config.train.steps for run in runs} == {8}
    assert runs[0].name == "lr-0.001_exact-0_seed-0" and runs[-1].name == "seed-7"
    folders = [run.config.train.output_dir for run in runs]
    assert folders == [tmp_path / "sweep" / "runs" / run.name for run in runs]


def test_a_section_is_replaced_whole(tmp_path: Path) -> None:
    """`gmc` with a member limit beside methods that have none."""
    methods = [{"name": "none"}, {"name": "gmc"}, {"name": "gmc", "member_limit": 2.0}]
    runs = planned_runs(planned(tmp_path, {"estimator": methods}))
    assert [run.name for run in runs] == ["none", "gmc", "member_limit-2_gmc"]
    assert [run.config.estimator.name for run in runs] == ["none", "gmc", "gmc"]


def test_names_are_names_of_folders() -> None:
    assert run_name({"policy.path": "../a b/c"}) == "path-..-a-b-c"
    assert run_name({"rollout.lag": {"bounded": 4}}) == "bounded-4"


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"optim.lrr": [1]}, "run lrr-1: optim.lrr: unknown key; did you mean lr"),
        ({"rollout.temperature": [1.0, 0.0]}, "run temperature-0: rollout.temperature: 0.0"),
        ({"train.output_dir": ["x"]}, "the sweep gives each run a folder of its own"),
        ({"train.seed": [1, 1]}, "seed-1 stands for two runs"),
        ({"train.seed": []}, r"grids\[0\].train.seed"),
        ({"policy.path": ["x" * 300]}, "is too long for a folder's name"),
    ],
)
def test_a_faulty_sweep_is_refused_whole(
    tmp_path: Path, grid: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned_runs(planned(tmp_path, grid))


def test_settings_of_slurm_cannot_smuggle_lines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"slurm\.partition"):
        planned(tmp_path, {"train.seed": [0]}, slurm={"partition": "a\nrm -r /"})


@pytest.mark.parametrize(("name", "runs"), [("sweep.yaml", 12), ("sweep_full.yaml", 330)])
def test_the_examples_are_runnable(name: str, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sweep = SweepConfig.model_validate(yaml.safe_load((EXAMPLES / name).read_text()))
    assert len(planned_runs(sweep)) == runs


def test_cores_are_shared_out() -> None:
    assert core_sets([0, 1, 2, 3, 4], 2) == [(0, 2, 4), (1, 3)]
    assert core_sets([4, 7], 2) == [(4,), (7,)]
    assert core_sets([4, 7], 3) == [(4, 7)] * 3
