"""The index of a Megatron dist-checkpoint, read without running anything that it holds.

Format: torch.distributed.checkpoint (`.metadata`, a pickle, and `*.distcp`), as megatron-core's
`torch_dist` backend writes it. torch and megatron unpickle `.metadata` and the small objects
beside the tensors as they are, and a pickle can run any code; so both are looked through first.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

METADATA = ".metadata"
COMMON = "common.pt"
FORMAT = "metadata.json"

_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
)
# Plain records of those modules; none of them does anything when it is made.
_RECORDS = frozenset(
    {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "SavePlan",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
        "_MEM_FORMAT_ENCODING",
        "_StorageInfo",
    }
)
_HARMLESS = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }
)


class _Records(pickle.Unpickler):
    """Makes records, sizes and dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _HARMLESS or (module in _MODULES and name in _RECORDS):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it would run {module}.{name}")


def _member(kind: object, name: object) -> Enum:
    """What some Pythons (3.11.2) pickle a member of an enum as: getattr of its class and name."""
    members = kind.__members__ if isinstance(kind, type) and issubclass(kind, Enum) else {}
    if isinstance(name, str) and name in members:
        return members[name]
    raise pickle.UnpicklingError(f"it would read {name!r} of {kind!r}")


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` holds a Megatron dist-checkpoint."""
    return (folder / FORMAT).is_file()


def read_metadata(folder: Path) -> Metadata:
    """The index of the checkpoint in `folder`, with its pickles known to be harmless.

    Raises ValueError where the folder holds no such checkpoint, a damaged one, or one with a
    pickle that would run something.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            found = _Records(file).load()
    except FileNotFoundError:
        raise ValueError(f"{folder} is no Megatron checkpoint: it has no {METADATA}") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError) as error:
        raise ValueError(f"cannot read the checkpoint index {path}: {error}") from None
    if not isinstance(found, dcp.Metadata):
        raise ValueError(f"{path} is no checkpoint index: it holds a {type(found).__name__}")
    for name, content in _objects(folder, found):
        try:
            torch.load(content, weights_only=True)
        except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"{folder}: object {name} is refused: {reason}") from None
    return found


def stored_bytes(folder: Path, index: Metadata, part: MetadataIndex) -> io.BytesIO:
    """The bytes of one stored part; raises ValueError where the files do not hold all of it."""
    place = (index.storage_data or {}).get(part)
    if place is None:
        raise ValueError(f"{folder}: {part.fqn} is not whole; the checkpoint is damaged")
    path = folder / place.relative_path
    try:
        with path.open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.length)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if len(content) < place.length:
        raise ValueError(f"{path} is damaged: it ends within {part.fqn}")
    return io.BytesIO(content)


def _objects(folder: Path, index: Metadata) -> Iterator[tuple[str, io.BytesIO]]:
    """Everything that is no tensor, as it lies in the files."""
    common = folder / COMMON
    if common.exists():
        yield COMMON, io.BytesIO(common.read_bytes())
    for part in index.storage_data or {}:
        if isinstance(index.state_dict_metadata.get(part.fqn), BytesStorageMetadata):
            yield part.fqn, stored_bytes(folder, index, part)
