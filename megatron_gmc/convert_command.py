"""`convert`: a Hugging Face folder to a Megatron checkpoint, or back, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import prod
from pathlib import Path
from typing import Literal, get_args

import torch

from megatron_gmc.convert.dist_checkpoint import (
    parameters,
    read_tensors,
    stored_dtype,
    write_checkpoint,
)
from megatron_gmc.convert.dist_metadata import is_checkpoint
from megatron_gmc.convert.experts import single
from megatron_gmc.convert.hf_config import ModelShape, load_shape
from megatron_gmc.convert.hugging_face import TensorFiles, new_folder, stream_folder, tensor_shapes
from megatron_gmc.convert.inventory import check_tensors
from megatron_gmc.convert.safetensors_stream import Entry
from megatron_gmc.errors import ConfigError, blamed_on
from megatron_gmc.setup_checks import is_lead
from megatron_gmc.storage import writing

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
_SAFETENSORS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def convert(
    source: Path,
    target: Path,
    *,
    like: Path | None,
    dtype: Dtype | None = None,
    dry_run: bool = False,
    verify: bool = False,
) -> int:
    """Convert in the direction that `source` tells; returns the exit code.

    A Megatron checkpoint holds no config and no tokenizer, so `like` names the Hugging Face
    folder that they come from. It may have been written on any mesh, and one that is written
    here can be read on any. `dtype` None keeps the weights' own. With `dry_run` everything is
    checked and nothing written; with `verify` both models then compute the logits of a few prompts,
    and the exit code is 1 where they differ by more than rounding. Raises ConfigError for faulty
    input, OutputError where the target cannot be written.
    """
    torch.set_num_threads(1)
    if not is_lead():
        # Under torchrun one process does the work.
        return 0
    if target.exists():
        raise ConfigError(f"{target} exists already; remove it, or choose another target")
    asked = None if dtype is None else getattr(torch, dtype)
    learner = source / "learner" if (source / "learner").is_dir() else source
    if not is_checkpoint(learner):
        shape, kept = _to_megatron(source, target, asked, dry_run)
        pair = source, target
    elif like is None:
        raise ConfigError(
            "--like: a Megatron checkpoint has no config.json and no tokenizer; name the "
            "Hugging Face folder to take them from"
        )
    else:
        shape, kept = _to_hugging_face(learner, target, like, asked, dry_run)
        pair = target, learner
    if dry_run or not verify:
        return 0
    from megatron_gmc.convert_verify import compare

    compared = compare(*pair, shape, kept)
    print(compared)
    return 0 if compared.agrees else 1


def _to_megatron(
    source: Path, target: Path, asked: torch.dtype | None, dry_run: bool
) -> tuple[ModelShape, torch.dtype]:
    with blamed_on(str(source)):
        shape = load_shape(source)
        check_tensors(tensor_shapes(source), shape)
        files = TensorFiles(source)
        dtype = asked or _only_dtype(files.dtypes.values())
    if not dry_run:
        with writing(target), new_folder(target) as folder:
            get = partial(single, names=files.dtypes, get=files.get)
            write_checkpoint(folder, shape, get, dtype)
    _say("Megatron checkpoint", target, shape, dtype, dry_run)
    return shape, dtype


def _to_hugging_face(
    source: Path, target: Path, like: Path, asked: torch.dtype | None, dry_run: bool
) -> tuple[ModelShape, torch.dtype]:
    with blamed_on(f"--like {like}"):
        shape = load_shape(like)
        dtype = asked or stored_dtype(source, shape)
    entries = [
        Entry(layout.name, layout.shape)
        for parameter in parameters(shape)
        for layout in parameter.tensors
    ]
    if not dry_run:
        with writing(target), blamed_on(f"--like {like}"):
            stream_folder(target, entries, dtype, read_tensors(source, shape), like)
    _say("Hugging Face folder", target, shape, dtype, dry_run)
    return shape, dtype


def _only_dtype(names: Iterable[str]) -> torch.dtype:
    """The one dtype of all tensors; raises ValueError where there are several, or another."""
    found = sorted(set(names))
    if len(found) == 1 and found[0] in _SAFETENSORS:
        return _SAFETENSORS[found[0]]
    raise ValueError(
        f"its tensors are {', '.join(found)}; a checkpoint has one dtype: give --dtype, one of "
        f"{', '.join(DTYPES)}"
    )


def _say(kind: str, target: Path, shape: ModelShape, dtype: torch.dtype, dry_run: bool) -> None:
    elements = sum(prod(parameter.shape) for parameter in parameters(shape))
    size = elements * dtype.itemsize / 1e9
    print(
        f"{'would write' if dry_run else 'wrote'} the {kind} {target}: {elements:,} parameters, "
        f"{size:.2f} GB as {str(dtype).removeprefix('torch.')}"
    )
