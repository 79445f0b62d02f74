"""A sealed folder is known to the byte. Its hashes are those of sha256sum."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from megatron_gmc.manifest import MANIFEST, fault_of, list_part, seal


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """Two ranks listed what they wrote; one file is left to the one that seals."""
    folder = tmp_path / "step_000002"
    (folder / "learner").mkdir(parents=True)
    for rank in (0, 1):
        file = folder / "learner" / f"part{rank}"
        file.write_bytes(bytes(range(100 + rank)))
        list_part(folder, rank, [file])
    (folder / "common").write_bytes(b"")
    seal(folder)
    return folder


def test_every_file_is_listed(sealed: Path) -> None:
    files = json.loads((sealed / MANIFEST).read_text())["files"]
    assert list(files) == ["common", "learner/part0", "learner/part1"]
    shown = subprocess.run(
        ["sha256sum", *files], cwd=sealed, capture_output=True, text=True, check=True
    )
    assert [entry["sha256"] for entry in files.values()] == [
        line.split()[0] for line in shown.stdout.splitlines()
    ]
    assert [entry["bytes"] for entry in files.values()] == [0, 100, 101]
    assert sorted(path.name for path in sealed.iterdir()) == ["common", "learner", MANIFEST]
    assert fault_of(sealed) is None


def test_what_is_wrong_is_said(sealed: Path) -> None:
    manifest, part = sealed / MANIFEST, sealed / "learner" / "part1"
    listed = manifest.read_text()
    part.write_bytes(bytes(101))
    assert fault_of(sealed) == "learner/part1 holds other bytes than were written"
    part.write_bytes(bytes(99))
    assert fault_of(sealed) == "learner/part1 has 99 bytes, 101 were written"
    part.unlink()
    assert fault_of(sealed) == "learner/part1 is missing"
    for text in (listed[: len(listed) // 2], "[]", "{}"):
        manifest.write_text(text)
        assert str(fault_of(sealed)).startswith("manifest.json is damaged: ")
    manifest.write_text(json.dumps(json.loads(listed) | {"format": 2}))
    assert fault_of(sealed) == "manifest.json has format 2, this version reads 1"
    manifest.unlink()
    assert fault_of(sealed) == "it has no manifest.json, so it was not written to its end"
