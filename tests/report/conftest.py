"""Pages for a browser to open."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gmc.report_command import report
from tests.report.records import (
    HOSTILE,
    course,
    settings,
    trajectory_rows,
    write_run,
    write_trajectories,
)


@pytest.fixture(scope="session")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose names, prompts and responses try to run scripts, and its report."""
    folder = tmp_path_factory.mktemp("one") / "run <b>&"
    tree = settings(estimator={"name": HOSTILE, "epsilon": 0.2})
    refusals = {f"rollout/refused/{HOSTILE}": 1.0}
    write_run(folder, course(40, **refusals), tree=tree)
    rows = trajectory_rows(steps=5, groups=3, members=4, text=f"7+5=12;{HOSTILE}")
    write_trajectories(folder, [row | {"prompt": HOSTILE, "prompt_id": HOSTILE} for row in rows])
    assert report([folder], output=None, tokens=None) == 0
    return folder / "report.html"


@pytest.fixture(scope="session")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep-like folder: two methods at two lags, three seeds each, and its report."""
    folder = tmp_path_factory.mktemp("grid")
    for name in ("gmc", "none"):
        for lag in (4, 16):
            for seed in range(3):
                tree = settings(
                    estimator={"name": name, "epsilon": 0.2 if name == "gmc" else None},
                    rollout__lag={"exact": lag, "bounded": None},
                    train__seed=seed,
                )
                lines = course(20, seed=seed + lag)
                lines.append({"step": 20, "evaluation/accuracy": 0.7 + 0.05 * seed})
                write_run(folder / f"{name}-lag{lag}-seed{seed}", lines, tree=tree)
    assert report([folder], output=None, tokens=None) == 0
    return folder / "report.html"
