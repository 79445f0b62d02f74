"""Strict loading: every tensor by name and shape, or a message that names the wrong one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_gmc.rollout.embedded.sampling import SamplingJob, sample
from megatron_gmc.rollout.embedded.weights import WeightsError, load_folder, load_weights
from tests.rollout.models import oracle_log_probs, oracle_model, save_tiny_model

Tensors = dict[str, Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", seed=1)


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


WRONG: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop(UP), f"{UP} is missing"),
    "unexpected": (lambda t: t.update(extra=torch.ones(2)), "extra in .* is not a tensor"),
    "another layer": (
        lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(64, 32)}),
        r"model\.layers\.2\.mlp\.up_proj\.weight in .* is not a tensor",
    ),
    "shape": (
        lambda t: t.update({UP: torch.ones(64, 31)}),
        rf"{UP} in .* has shape \(64, 31\), the model needs \(64, 32\)",
    ),
    "transposed": (lambda t: t.update({UP: torch.ones(32, 64)}), r"has shape \(32, 64\)"),
    "another vocabulary": (
        lambda t: t.update({"model.embed_tokens.weight": torch.ones(25, 32)}),
        r"model\.embed_tokens\.weight in .* has shape \(25, 32\)",
    ),
    "not finite": (lambda t: t[UP].view(-1)[5].fill_(torch.nan), f"{UP} in .* holds NaN"),
    "tied but different": (
        lambda t: t.update({"lm_head.weight": torch.ones(24, 32)}),
        r"lm_head\.weight in .* differs from the embedding",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_weights_are_named(folder: Path, case: str) -> None:
    model = load_folder(folder)
    change, message = WRONG[case]
    edit(folder, change)
    with pytest.raises(WeightsError, match=message):
        load_weights(type(model), model.config, folder)
    with pytest.raises(WeightsError, match=message):
        load_folder(folder)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None], ids=repr)
def test_a_broken_file_is_named(folder: Path, content: bytes | None) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load_folder(folder)


def test_a_folder_without_a_model_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no config\.json in"):
        load_folder(tmp_path / "nowhere")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")  # a pickle is never read
    with pytest.raises(WeightsError, match=r"no model\.safetensors"):
        load_folder(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"config\.json: "):
        load_folder(folder)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, seed=1, tied=False)
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WeightsError, match=r"lm_head\.weight is missing"):
        load_folder(folder)


def test_a_refusal_leaves_the_old_model_untouched(folder: Path, tmp_path: Path) -> None:
    model = load_folder(folder)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = save_tiny_model(tmp_path / "other", seed=2)
    edit(other, lambda tensors: tensors.pop(UP))
    with pytest.raises(WeightsError):
        load_weights(type(model), model.config, other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_an_index_of_files_and_lower_precision_are_read(folder: Path) -> None:
    """Values are those of the files, in float32."""
    tensors = {
        name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"one.safetensors": names[:7], "two.safetensors": names[7:]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    index = {name: file for file, members in parts.items() for name in members}
    text = str({"metadata": {}, "weight_map": index}).replace("'", '"')
    (folder / "model.safetensors.index.json").write_text(text)
    state = load_folder(folder).state_dict()
    for name in names:
        assert state[name].dtype == torch.float32
        assert torch.equal(state[name], tensors[name].float())
    shutil.copy(folder / "one.safetensors", folder / "two.safetensors")
    with pytest.raises(WeightsError, match="is missing"):
        load_folder(folder)
    (folder / "two.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"two\.safetensors"):
        load_folder(folder)


def test_a_mixture_of_experts_is_served_too(tmp_path: Path) -> None:
    """Its file names each expert; the model in memory holds them stacked."""
    torch.manual_seed(4)
    config = Qwen3MoeConfig(
        vocab_size=24,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names
    samples = sample(load_folder(tmp_path), SamplingJob(((1, 2), (3,)), (5, 6), 3, 1.0, 6, ()))
    oracle = oracle_model(tmp_path)
    for index in range(6):
        prompt = ((1, 2), (3,))[index // 3]
        expected = oracle_log_probs(oracle, prompt, samples.tokens[index].tolist(), 1.0)
        assert (samples.log_probs[index].double() - expected).abs().max() <= 1e-5
    edit(tmp_path, lambda t: t.pop("model.layers.0.mlp.experts.3.down_proj.weight"))
    with pytest.raises(WeightsError, match="experts"):
        load_folder(tmp_path)
