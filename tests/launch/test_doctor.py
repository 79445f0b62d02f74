"""Each check on what it should find, and the command alone and over ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from megatron_gmc.cli import main
from megatron_gmc.launch import checks
from megatron_gmc.launch.checks import Check
from megatron_gmc.launch.doctor import checkpoint_bytes
from tests.distributed import run_ranks
from tests.qwen3 import save_tiny_qwen3
from tests.runs import train_tree, write_config


def states(found: object) -> dict[str, str]:
    return {check.name: check.state for check in found}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("found", "failed"),
    [
        ({"torch": "2.13.0", "megatron-core": "0.16.1"}, False),
        ({"torch": "2.13.0", "megatron-core": "0.19.2", "triton": "3.5.0"}, False),
        ({"torch": "2.13.0", "megatron-core": "0.19.2"}, True),
        ({"torch": "2.13.0", "megatron-core": "0.15.0"}, True),
        ({"torch": "2.13.0"}, True),
    ],
)
def test_pairs_of_versions(found: dict[str, str], failed: bool) -> None:
    lines = list(checks.check_versions(found))
    assert ("failed" in states(lines).values()) is failed
    assert all(line.remedy for line in lines if line.state != "ok")


def test_what_is_installed_is_what_python_imports() -> None:
    assert checks.installed()["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("build", "devices", "ranks", "driver", "state"),
    [
        ("12.8", 8, 8, True, "ok"),
        ("12.8", 4, 8, True, "failed"),
        (None, 0, 1, True, "warning"),
        (None, 0, 1, False, "ok"),
        (None, 0, 10_000, False, "warning"),
    ],
)
def test_devices(build: str | None, devices: int, ranks: int, driver: bool, state: str) -> None:
    (line,) = checks.check_devices(build, devices, ranks, driver)
    assert line.state == state
    assert bool(line.remedy) is (state != "ok")


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
    assert states(checks.check_threads(1)) == {"threads": "ok"}
    assert states(checks.check_threads(2)) == {"threads": "warning"}
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert states(checks.check_threads(2)) == {"threads": "ok"}


def test_disk(tmp_path: Path) -> None:
    """A folder that does not exist yet is looked at where it would be made."""
    free = shutil.disk_usage(tmp_path).free
    new = tmp_path / "runs" / "new"
    assert states(checks.check_disk(new, free // 2))["disk"] == "ok"
    assert states(checks.check_disk(new, free * 2))["disk"] == "failed"
    assert not list(tmp_path.iterdir())


def test_the_size_of_a_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from megatron_gmc.convert.hf_config import load_shape

    save_tiny_qwen3(tmp_path, tied=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert checkpoint_bytes(load_shape(tmp_path)) == 12 * model.num_parameters()


def test_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "versions" in capsys.readouterr().out


def test_over_ranks(tmp_path: Path) -> None:
    """With a config the mesh's own groups are tried."""
    save_tiny_qwen3(tmp_path / "policy", tied=True)
    config = write_config(
        tmp_path / "train.yaml", train_tree(tmp_path, tmp_path / "run", mesh={"tensor": 2})
    )
    lead, other = run_ranks("megatron_gmc", "doctor", 2, str(config))
    assert "all-reduce, tensor" in lead
    assert "all-reduce, data" not in lead
    assert "clocks" in lead
    assert "all-reduce" not in other


def test_context_groups_are_tried(tmp_path: Path) -> None:
    save_tiny_qwen3(tmp_path / "policy", tied=True)
    config = write_config(
        tmp_path / "train.yaml", train_tree(tmp_path, tmp_path / "run", mesh={"context": 2})
    )
    lead, _ = run_ranks("megatron_gmc", "doctor", 2, str(config))
    assert "all-reduce, context" in lead


def test_a_mesh_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_qwen3(tmp_path / "policy", tied=True)
    config = write_config(
        tmp_path / "train.yaml", train_tree(tmp_path, tmp_path / "run", mesh={"tensor": 2})
    )
    assert main(["doctor", str(config)]) == 2
    assert "mesh.tensor 2" in capsys.readouterr().err


def test_lines_of_some_ranks_name_them() -> None:
    from megatron_gmc.launch.doctor import _merge

    common = Check("versions", "ok", "same")
    odd = Check("devices", "failed", "3 GPUs for 4 ranks on this machine", "start 3 ranks")
    merged = _merge([[common, odd], [common, Check("devices", "ok", "4 GPUs")], [common, odd]])
    assert merged[0] == common
    assert [line.detail for line in merged[1:]] == [
        "rank 0, 2: 3 GPUs for 4 ranks on this machine",
        "rank 1: 4 GPUs",
    ]
