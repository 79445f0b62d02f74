"""Hugging Face model folders: weights streamed in, whole folders written at once or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_gmc.convert.safetensors_stream import Entry, write_files

T = TypeVar("T")

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

# What makes a folder usable besides its weights and config.json.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def stream_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a folder's safetensors by name, on the CPU, one at a time.

    Reads model.safetensors, or the files that model.safetensors.index.json names. Raises
    ValueError where there is neither, where the index and the files disagree, where a file is
    damaged, and for a folder that holds pickles alone: those can run code when they are read.
    """
    yield from _read(folder, lambda file, name: file.get_tensor(name))


def tensor_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, from the files' headers; raises as `stream_tensors`."""
    yield from _read(folder, lambda file, name: tuple(file.get_slice(name).get_shape()))


class TensorFiles:
    """The tensors of a folder by name, each read when it is asked for and kept by nobody.

    Raises ValueError as `stream_tensors`.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        self.dtypes: dict[str, str] = {}
        """Each tensor's dtype as safetensors names it, as F32 or BF16."""
        for path in _weight_files(folder):
            with _opened(folder, path) as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    self._files[name] = path
                    self.dtypes[name] = file.get_slice(name).get_dtype()

    def get(self, name: str) -> Tensor:
        """The tensor `name`, on the CPU."""
        # The file is mapped for this one tensor: pages of others never count as ours.
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor


@contextmanager
def _opened(folder: Path, path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise ValueError(f"{folder / _INDEX} names {path.name}, which is missing") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _read(folder: Path, value: Callable[[safe_open, str], T]) -> Iterator[tuple[str, T]]:
    for path, names in _weight_files(folder).items():
        with _opened(folder, path) as file:
            present = list(file.keys())
            if names is not None and set(names) != set(present):
                name = min(set(names) ^ set(present))
                raise ValueError(f"{folder / _INDEX} and {path.name} disagree about {name}")
            for name in present:
                yield name, value(file, name)


def _weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """The files to read, each with the tensors that the index promises (None without an index)."""
    if (folder / _WEIGHTS).exists():
        return {folder / _WEIGHTS: None}
    if (folder / _INDEX).exists():
        return _indexed_files(folder)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} holds its weights as {pickles[0]}, a pickle, which can run code when it is "
            "read and is not opened; save it as safetensors, with save_pretrained of transformers"
        )
    raise ValueError(f"{folder} holds no weights: neither {_WEIGHTS} nor {_INDEX}")


def _indexed_files(folder: Path) -> dict[Path, list[str] | None]:
    path = folder / _INDEX
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        items = sorted(weight_map.items())
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is no index of safetensors: it needs a weight_map") from None
    files: dict[Path, list[str] | None] = {}
    for name, file in items:
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{path}: {name} lies in {file!r}, which is no file of this folder")
        names = files.setdefault(folder / file, [])
        assert names is not None
        names.append(name)
    return files


def write_folder(
    target: Path,
    tensors: Iterable[tuple[str, Tensor]],
    source: Path,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Write a Hugging Face folder with these weights and `source`'s config and tokenizer.

    The folder appears under `target` whole, by one rename, or not at all. Memory: the tensors of
    one shard, at most `max_shard_bytes` (or one tensor). config.json's dtype is set to that of
    the weights. Raises ValueError where `target` exists or `source` has no config.json, OSError
    where writing fails, as on a full disk.
    """
    with _beside_config(target, source) as partial:
        dtypes = _write_weights(partial, tensors, max_shard_bytes)
        _write_config(partial, source, dtypes)


def stream_folder(
    target: Path,
    entries: Sequence[Entry],
    dtype: torch.dtype,
    tensors: Iterator[tuple[str, Tensor]],
    source: Path,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """As `write_folder`, for tensors known beforehand, which come in the order of `entries`.

    Memory: one tensor.
    """
    with _beside_config(target, source) as partial:
        shards = write_files(partial, entries, dtype, tensors, max_shard_bytes)
        total = sum(prod(entry.shape) for entry in entries) * dtype.itemsize
        _name_shards(partial, shards, total)
        _write_config(partial, source, {str(dtype).removeprefix("torch.")})


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which appears under `target` whole, by one rename, or not at all.

    Raises ValueError where `target` exists.
    """
    if target.exists():
        raise ValueError(f"{target} exists already; remove it, or write to another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _beside_config(target: Path, source: Path) -> Iterator[Path]:
    """A new folder for weights that belong to `source`'s config and tokenizer."""
    if not (source / "config.json").exists():
        raise ValueError(f"{source} has no config.json to go with the weights")
    with new_folder(target) as partial:
        yield partial
        for name in _COMPANIONS:
            if (source / name).exists():
                shutil.copyfile(source / name, partial / name)


def _write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> set[str]:
    """Write model.safetensors, or shards and their index; returns the names of the dtypes."""
    dtypes: set[str] = set()
    shards: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}
    total = pending_bytes = 0

    def flush() -> None:
        assert pending, "no tensor to write; under torchrun only rank 0 is given them"
        path = folder / f"shard-{len(shards)}.safetensors"
        try:
            save_file(pending, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from error
        shards.append((path, list(pending)))
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor.detach().cpu().contiguous()
        pending_bytes += tensor.nbytes
        total += tensor.nbytes
        dtypes.add(str(tensor.dtype).removeprefix("torch."))
    flush()
    _name_shards(folder, shards, total)
    return dtypes


def _name_shards(folder: Path, shards: list[tuple[Path, list[str]]], total_bytes: int) -> None:
    """Give the files the names that Hugging Face expects, which hold the number of shards."""
    if len(shards) == 1:
        shards[0][0].rename(folder / _WEIGHTS)
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(folder / _INDEX, index)


def _write_config(folder: Path, source: Path, dtypes: set[str]) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if len(dtypes) == 1:
        # transformers loads in the dtype that config.json names, and so could round the weights.
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = next(iter(dtypes))
    _write_json(folder / "config.json", config)


def _write_json(path: Path, tree: Mapping[str, object]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
