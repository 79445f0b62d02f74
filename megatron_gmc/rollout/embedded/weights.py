"""Loads a Hugging Face folder strictly: every tensor, by name and shape, or none."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class WeightsError(ValueError):
    """The folder does not hold the model's weights; the message names the file or tensor."""


def load_folder(folder: Path) -> PreTrainedModel:
    """Build the model that `folder`/config.json describes and load its weights, float32.

    Raises WeightsError for a folder without a known model or whose weights do not fit it.
    """
    if not (folder / "config.json").is_file():
        raise WeightsError(f"no config.json in {folder}")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model_class = type(AutoModelForCausalLM.from_config(config))
    except (ValueError, OSError, KeyError) as error:
        raise WeightsError(f"{folder}/config.json: {_first_line(error)}") from error
    return load_weights(model_class, config, folder)


def load_weights(
    model_class: type[PreTrainedModel], config: PretrainedConfig, folder: Path
) -> PreTrainedModel:
    """A new model of `config` with the safetensors of `folder`, float32, in evaluation mode.

    A new model, so that a refusal leaves the old one as it was. Raises WeightsError naming the
    first tensor that is missing, unexpected, of another shape or not finite.
    """
    tensors = _read(folder)
    for name, tensor in sorted(tensors.items()):
        if not tensor.isfinite().all():
            raise WeightsError(f"{name} in {folder} holds NaN or infinite values")
    try:
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below instead
        )
    except (RuntimeError, ValueError) as error:
        raise WeightsError(f"weights in {folder}: {_first_line(error)}") from error
    _check_report(report, folder)
    if config.get_text_config().tie_word_embeddings:
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if head.weight is not embedding.weight:
            raise WeightsError(
                f"lm_head.weight in {folder} differs from the embedding it is tied to"
            )
    loaded: PreTrainedModel = model.eval()
    return loaded


def _check_report(report: dict[str, set[object]], folder: Path) -> None:
    for name in sorted(map(str, report["missing_keys"])):
        raise WeightsError(f"{name} is missing in {folder}")
    for name in sorted(map(str, report["unexpected_keys"])):
        raise WeightsError(f"{name} in {folder} is not a tensor of this model")
    for mismatch in report["mismatched_keys"]:
        assert isinstance(mismatch, tuple)
        name, found, wanted = mismatch
        raise WeightsError(
            f"{name} in {folder} has shape {tuple(found)}, the model needs {tuple(wanted)}"
        )
    for message in report["error_msgs"]:
        raise WeightsError(f"weights in {folder}: {message}")


def _read(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in _files(folder):
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file}: {_first_line(error)}") from error
    return tensors


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise WeightsError(f"no {SINGLE_FILE} or {INDEX_FILE} in {folder}")
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index} is not an index of safetensors files") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
