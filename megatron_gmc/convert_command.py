"""`convert`: a Hugging Face folder to a Megatron checkpoint, or back."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_gmc.convert.hf_config import load_shape
from megatron_gmc.convert.hugging_face import stream_tensors, tensor_shapes
from megatron_gmc.convert.inventory import check_tensors
from megatron_gmc.errors import ConfigError, blamed_on
from megatron_gmc.learner.checkpoint import committed_folder, load_model, save_model
from megatron_gmc.learner.mesh import Mesh
from megatron_gmc.learner.model import build_model
from megatron_gmc.learner.model_weights import load_weights, named_weights
from megatron_gmc.storage import writing
from megatron_gmc.weights import write_weights


def convert(source: Path, target: Path, *, like: Path | None) -> int:
    """Convert in the direction that `source` tells; returns the exit code.

    A Megatron checkpoint holds no config and no tokenizer, so `like` names the Hugging Face
    folder that they come from. It may have been written on any mesh, and one that is written
    here can be read on any.
    """
    torch.set_num_threads(1)
    if target.exists():
        raise ConfigError(f"{target} exists already; remove it, or choose another target")
    learner = source / "learner" if (source / "learner").is_dir() else source
    if (learner / "metadata.json").exists():
        if like is None:
            raise ConfigError(
                "--like: a Megatron checkpoint has no config.json and no tokenizer; name the "
                "Hugging Face folder to take them from"
            )
        return _to_hugging_face(learner, target, like)
    return _to_megatron(source, target)


def _to_megatron(source: Path, target: Path) -> int:
    with blamed_on(str(source)):
        shape = load_shape(source)
        check_tensors(tensor_shapes(source), shape)
    mesh = Mesh.create(1, 1)
    chunks = build_model(shape, mesh)
    with blamed_on(str(source)):
        load_weights(chunks, shape, mesh, stream_tensors(source))
    with writing(target), committed_folder(target, mesh) as partial:
        save_model(partial, chunks)
    return _done(mesh, f"wrote the Megatron checkpoint {target}")


def _to_hugging_face(source: Path, target: Path, like: Path) -> int:
    with blamed_on(str(like)):
        shape = load_shape(like)
    mesh = Mesh.create(1, 1)
    chunks = build_model(shape, mesh)
    with blamed_on(f"--like {like}"):
        load_model(source, chunks)
    write_weights(named_weights(chunks, shape, mesh), mesh, like, target)
    return _done(mesh, f"wrote the Hugging Face folder {target}")


def _done(mesh: Mesh, text: str) -> int:
    if mesh.rank == 0:
        print(text)
    mesh.close()
    return 0
