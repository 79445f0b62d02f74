"""What a checkpoint holds, file by file, so that a damaged one is found before it is loaded.

manifest.json lists each file's size and SHA-256. It is written last of all files, so a folder
without one is not whole. Each rank lists what it wrote itself, in a part of its own; sealing the
folder joins the parts and lists what is left.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

MANIFEST = "manifest.json"
_PART = "manifest.rank{}.json"
_FORMAT = 1
# Hashing releases the interpreter, and a parallel file system answers several readers faster.
_READERS = 8


class _Entry(TypedDict):
    bytes: int
    sha256: str


def list_part(folder: Path, rank: int, files: Iterable[Path]) -> None:
    """Write down size and hash of `files` of `folder`, which rank `rank` has written."""
    entries = {str(file.relative_to(folder)): _entry(file) for file in files}
    (folder / _PART.format(rank)).write_text(json.dumps(entries))


def seal(folder: Path) -> None:
    """Join the ranks' parts, list what they left out, and write manifest.json to the disk."""
    entries: dict[str, _Entry] = {}
    for part in sorted(folder.glob(_PART.format("*"))):
        entries |= json.loads(part.read_text())
        part.unlink()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        if name not in entries:
            entries[name] = _entry(file)
    with (folder / MANIFEST).open("w", encoding="utf-8") as out:
        json.dump({"format": _FORMAT, "files": dict(sorted(entries.items()))}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def fault_of(folder: Path) -> str | None:
    """Say what is wrong with a sealed folder, or None where every byte is what was written.

    Files that the manifest does not list are not looked at.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return f"it has no {MANIFEST}, so it was not written to its end"
    try:
        listed = json.loads(path.read_text())
        entries: dict[str, _Entry] = listed["files"]
        if listed["format"] != _FORMAT:
            return f"{MANIFEST} has format {listed['format']}, this version reads {_FORMAT}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is damaged: {error!r}"
    with ThreadPoolExecutor(_READERS) as readers:
        faults = readers.map(lambda item: _fault_of_file(folder, *item), entries.items())
        return next((fault for fault in faults if fault is not None), None)


def _fault_of_file(folder: Path, name: str, entry: _Entry) -> str | None:
    file = folder / name
    if not file.is_file():
        return f"{name} is missing"
    size = file.stat().st_size
    if size != entry["bytes"]:
        return f"{name} has {size} bytes, {entry['bytes']} were written"
    if _entry(file)["sha256"] != entry["sha256"]:
        return f"{name} holds other bytes than were written"
    return None


def _entry(file: Path) -> _Entry:
    with file.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}
