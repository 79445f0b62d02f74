"""What several rooms' tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import browser, opened
from tests.distributed import run_ranks
from tests.runs import (
    TIMEOUT_S,
    completed,
    end_world,
    make_task,
    sft_tree,
    train_tree,
    write_config,
)

__all__ = ["browser", "opened"]


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small task and an untrained policy; nobody writes into it."""
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def finished(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run at exact lag 2 that nothing interrupted; nobody writes into it.

    In a process of its own, as every run whose bits are compared: what other tests do to libraries
    in this process may show in the last bits.
    """
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder / "train.yaml", train_tree(task, folder / "run"))
    completed("train", config)
    return folder / "run"


@pytest.fixture(scope="session")
def meshes(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on two ranks, one after the other in the same processes."""
    folder = tmp_path_factory.mktemp("meshes")
    distributed: dict[str, dict[str, object]] = {
        "optim": {"distributed": True},
        "rollout": {"lag": {"exact": 1}},
    }
    trees = {
        "tensor": train_tree(
            task, folder / "tensor", mesh={"tensor": 2, "sequence_parallel": True}
        ),
        "pipeline": train_tree(
            task,
            folder / "pipeline",
            mesh={"pipeline": 2},
            train={"steps": 3, "save_every": None},
            rollout={"lag": {"exact": 0}},
        ),
        "data": train_tree(task, folder / "data", **distributed),
        "data_resumed": train_tree(task, folder / "data_resumed", **distributed),
        "sft": sft_tree(task, folder / "sft"),
    }
    for name, tree in trees.items():
        write_config(folder / f"{name}.yaml", tree)
    run_ranks("tests.train_workers", "run_all", 2, str(folder), *trees, timeout=2 * TIMEOUT_S)
    return folder


@pytest.fixture
def own_world() -> Iterator[None]:
    """A command that fails in this process leaves its groups to the process's end; end them."""
    yield
    end_world()
