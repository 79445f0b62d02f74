"""A checkpoint of one mesh goes on on another, on four gloo ranks; what cannot is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_gmc.learner.checkpoint import load_learner, save_learner, save_model
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model import build_model
from megatron_gmc.optim_config import OptimConfig
from tests.distributed import run_ranks
from tests.learner.steps import ADAMW, DISTRIBUTED, imitate, new_learner
from tests.models import save_tiny_model, tiny_model

# (model, optimizer, mesh of the save) → meshes of the loads, named as workers.create_mesh reads
# them; data takes what they leave of four ranks. Padding of the vocabulary (101) differs as well.
SAVES = {
    ("qwen3", "plain", "t2p2"): ("p2v3", "t4"),
    ("qwen3", "distributed", "p2v3"): ("t1", "t2s"),
    ("qwen3_moe", "distributed", "e2"): ("e4", "t2e2s", "p2v3", "t1"),
    ("qwen3_moe", "plain", "t1"): ("p2e2",),
}
LOADS = [(*save, mesh) for save, meshes in SAVES.items() for mesh in meshes]
each_load = pytest.mark.parametrize("load", LOADS, ids="-".join)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reshard")
    for model in sorted({save[0] for save in SAVES}):
        save_tiny_model(folder / model, model, tied=True)
        tiny_model(model, tied=True, seed=5).save_pretrained(folder / f"{model}-other")
    names = [":".join((*save, ",".join(meshes))) for save, meshes in SAVES.items()]
    run_ranks("tests.learner.reshard_workers", "check", 4, str(folder), *names, timeout=300)
    return folder


def part(results: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in results.items() if name.startswith(kind)}


@each_load
def test_weights_are_those_that_were_saved(root: Path, load: tuple[str, str, str, str]) -> None:
    *save, mesh = load
    saved = part(load_file(root / "-".join((*save, save[-1]))), "loaded/")
    loaded = part(load_file(root / "-".join((*save, mesh))), "loaded/")
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@each_load
def test_training_goes_on_as_it_would_have(root: Path, load: tuple[str, str, str, str]) -> None:
    """D5: the losses of two more steps, and the weights after them, which need every moment.

    Under a pipeline the tied embedding's size, 3,232, is no multiple of what buckets are padded to.
    """
    *save, mesh = load
    expected = load_file(root / "-".join((*save, save[-1])))
    found = load_file(root / "-".join((*save, mesh)))
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-6, atol=0)
    before = part(expected, "loaded/")
    for name, tensor in part(expected, "next/").items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
        moved = float((tensor - before[name.replace("next/", "loaded/")]).abs().max())
        assert moved > 1e-3, name  # so that the line above says something


@pytest.mark.parametrize(("saved", "loaded"), [(ADAMW, DISTRIBUTED), (DISTRIBUTED, ADAMW)])
def test_another_kind_of_optimizer_is_refused(
    one_rank: Mesh, tmp_path: Path, saved: OptimConfig, loaded: OptimConfig
) -> None:
    """Megatron keeps the moments of the two in different forms."""
    folder = save_tiny_model(tmp_path / "model", "qwen3", tied=True)
    learner = new_learner(folder, one_rank, saved)
    imitate(learner, 1)
    save_learner(tmp_path / "checkpoint", learner)
    kinds = [f"optim.distributed {str(kind.distributed).lower()}" for kind in (saved, loaded)]
    fault = f"written with optim.name adamw, {kinds[0]}, and this run has .*{kinds[1]}"
    with pytest.raises(ValueError, match=fault):
        load_learner(tmp_path / "checkpoint", new_learner(folder, one_rank, loaded))


def test_sgd_is_refused_for_adamw(one_rank: Mesh, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3", tied=True)
    sgd = OptimConfig(name="sgd", lr=0.1, momentum=0.9)
    save_learner(tmp_path / "checkpoint", new_learner(folder, one_rank, sgd))
    with pytest.raises(ValueError, match=r"optim\.name sgd, .* this run has optim\.name adamw"):
        load_learner(tmp_path / "checkpoint", new_learner(folder, one_rank, ADAMW))


def test_weights_alone_are_no_learner(one_rank: Mesh, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3", tied=True)
    learner = new_learner(folder, one_rank, ADAMW)
    (tmp_path / "checkpoint").mkdir()
    save_model(tmp_path / "checkpoint", build_model(learner.shape, one_rank))
    with pytest.raises(ValueError, match="was written with no optimizer"):
        load_learner(tmp_path / "checkpoint", learner)


@pytest.mark.parametrize(
    ("other", "tied", "fault"),
    [
        ("llama", True, "shape mismatch .* decoder.layers.self_attention.linear_proj.weight"),
        ("qwen3", False, r"cannot read the checkpoint .*(output_layer|not in state dict)"),
        ("qwen3_moe", True, "decoder.layers.mlp.router.weight .*not in state dict"),
    ],
)
def test_another_model_is_refused(
    one_rank: Mesh, tmp_path: Path, other: str, tied: bool, fault: str
) -> None:
    learner = new_learner(save_tiny_model(tmp_path / "model", "qwen3", tied=True), one_rank, ADAMW)
    save_learner(tmp_path / "checkpoint", learner)
    another = new_learner(save_tiny_model(tmp_path / "other", other, tied), one_rank, ADAMW)
    with pytest.raises(ValueError, match=fault) as caught:
        load_learner(tmp_path / "checkpoint", another)
    assert re.match("cannot read the checkpoint .*/checkpoint: ", str(caught.value))
    assert len(str(caught.value)) < 500
