"""`convert` as a user runs it: every family there and back, verified; a trial; another dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_gmc.cli import main
from megatron_gmc.convert.hf_config import load_shape
from megatron_gmc.convert_verify import compare
from tests.models import FAMILIES, save_tiny_model, tiny_model
from tests.runs import end_world


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_and_verified(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, and both ways the logits are those of transformers."""
    source = save_tiny_model(tmp_path / "source", family, tied=False)
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    assert main(["convert", str(source), str(megatron), "--verify"]) == 0
    end_world()
    assert main(["convert", str(megatron), str(back), "--like", str(source), "--verify"]) == 0
    end_world()
    assert capsys.readouterr().out.count("largest difference of a logit") == 2
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (source, back))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_model_does_not_agree(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source", "qwen3", tied=True)
    other = tmp_path / "other"
    tiny_model("qwen3", tied=True, seed=3).save_pretrained(other)
    assert main(["convert", str(source), str(tmp_path / "megatron")]) == 0
    compared = compare(other, tmp_path / "megatron", load_shape(other), torch.float32)
    end_world()
    assert not compared.agrees


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_tiny_model(tmp_path / "source", "qwen2", tied=True)
    count = sum(t.numel() for t in load_file(source / "model.safetensors").values())
    assert main(["convert", str(source), str(tmp_path / "target"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("would write the Megatron checkpoint")
    assert f"{count:,} parameters" in said
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_another_dtype(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source", "llama", tied=True)
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    assert main(["convert", str(source), str(megatron), "--dtype", "bfloat16"]) == 0
    assert main(["convert", str(megatron), str(back), "--like", str(source)]) == 0
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (source, back))
    assert all(torch.equal(ours[name], theirs[name].bfloat16()) for name in theirs)
