"""Safetensors files written and read one tensor at a time.

The safetensors library writes a file from tensors that are all in memory; a model's file can be
larger than that. The format: 8 bytes, the little-endian length of a JSON header that names each
tensor's dtype, shape and byte range; the header; the bytes
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Entry:
    """A tensor to come: its name and shape."""

    name: str
    shape: tuple[int, ...]


def write_files(
    folder: Path,
    entries: Sequence[Entry],
    dtype: torch.dtype,
    tensors: Iterator[tuple[str, Tensor]],
    max_file_bytes: int,
) -> list[tuple[Path, list[str]]]:
    """Write `tensors`, which come in the order of `entries`, as `dtype` into as few files.

    Returns the files and the names in each. Memory: one tensor. Raises ValueError for a dtype
    that safetensors does not have, OSError where writing fails.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype} is none of {', '.join(map(str, _DTYPES))}")
    written = []
    for number, part in enumerate(_parts(entries, dtype.itemsize, max_file_bytes)):
        path = folder / f"shard-{number}.safetensors"
        with path.open("wb") as file:
            _write_header(file, part, dtype)
            for entry in part:
                name, tensor = next(tensors)
                assert (name, tuple(tensor.shape)) == (entry.name, entry.shape), name
                data = tensor.detach().to("cpu", dtype).contiguous()
                data.view(-1).view(torch.uint8).numpy().tofile(file)
        written.append((path, [entry.name for entry in part]))
    return written


def _parts(entries: Sequence[Entry], item_size: int, max_file_bytes: int) -> Iterator[list[Entry]]:
    part: list[Entry] = []
    size = 0
    for entry in entries:
        more = prod(entry.shape) * item_size
        if part and size + more > max_file_bytes:
            yield part
            part, size = [], 0
        part.append(entry)
        size += more
    yield part


def _write_header(file: BinaryIO, entries: Sequence[Entry], dtype: torch.dtype) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        stop = start + prod(entry.shape) * dtype.itemsize
        header[entry.name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    # Readers map the file, so the data starts at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
