"""tools/patches.py on folders made here, and every patch on the published package.

megatron-core 0.16.1 is the installed one. Other wheels are taken from the folder that
`MEGATRON_GMC_WHEELS` names (`pip download --no-deps megatron-core==0.19.2`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed import ROOT
from tools import patches
from tools.patches import PatchError, change, fitting, main, read_sets

WHEELS = os.environ.get("MEGATRON_GMC_WHEELS")
INSTALLED = version("megatron-core")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


BEFORE = {"lib/a.py": "one\ntwo\nthree\n", "lib/b.py": "x\ny\n"}
AFTER = {"lib/a.py": "one\ntwo\nnew\nthree\n", "lib/b.py": "x\nz\n"}
HUNKS = {"lib/a.py": "@@ -2,0 +3 @@\n+new\n", "lib/b.py": "@@ -2 +2 @@\n-y\n+z\n"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A patches folder with one set of two patches, one file each."""
    folder = tmp_path / "patches" / "thing" / "1.0"
    folder.mkdir(parents=True)
    pins = ""
    for number, path in enumerate(BEFORE, start=1):
        name = f"000{number}-change"
        (folder / f"{name}.patch").write_text(f"--- a/{path}\n+++ b/{path}\n{HUNKS[path]}")
        (folder / f"{name}.md").write_text("why")
        fields = {"file": f"{name}.patch", "feature": f"f{number}", "reason": "r", "link": "l"}
        pins += "[[patch]]\n" + "".join(
            f'{k} = "{v}"\n' for k, v in (fields | {"drop": "d"}).items()
        )
        pins += f'[[patch.target]]\npath = "{path}"\n'
        pins += f'before = "{digest(BEFORE[path])}"\nafter = "{digest(AFTER[path])}"\n'
    (folder / "pins.toml").write_text(pins)
    return tmp_path / "patches"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write(tmp_path / "target", BEFORE)


def write(folder: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_apply_and_revert_are_idempotent(root: Path, target: Path) -> None:
    chosen = fitting(read_sets(root), target, None)
    assert change(chosen, target, revert=True) == []
    assert change(chosen, target, revert=False) == ["0001-change.patch", "0002-change.patch"]
    assert contents(target) == AFTER
    assert change(chosen, target, revert=False) == []
    assert contents(target) == AFTER
    (target / "lib/b.py").write_text(BEFORE["lib/b.py"])
    assert change(chosen, target, revert=False) == ["0002-change.patch"]
    assert change(chosen, target, revert=True) == ["0001-change.patch", "0002-change.patch"]
    assert contents(target) == BEFORE


def test_a_file_with_another_hash_is_refused_and_none_is_changed(root: Path, target: Path) -> None:
    drifted = BEFORE | {"lib/b.py": "x\ny\n\n"}
    write(target, drifted)
    with pytest.raises(PatchError, match=r"thing/1\.0: 0001-change\.patch ready, .* foreign"):
        fitting(read_sets(root), target, None)
    (target / "lib/b.py").unlink()
    with pytest.raises(PatchError, match=r"0002-change\.patch absent"):
        fitting(read_sets(root), target, "thing")
    assert contents(target) == {"lib/a.py": BEFORE["lib/a.py"]}


def test_git_alone_would_apply_twice_and_in_the_wrong_place(root: Path, target: Path) -> None:
    """Why the hashes: a patch without context fits anywhere, and git says nothing."""
    patch = root / "thing/1.0/0001-change.patch"
    command = ["git", "apply", "--unidiff-zero", str(patch)]
    for _ in range(2):
        assert subprocess.run(command, cwd=target, check=True, capture_output=True).stderr == b""
    assert contents(target)["lib/a.py"] == "one\ntwo\nnew\nnew\nthree\n"
    write(target, {"lib/a.py": "zero\none\ntwo\nthree\n"})
    assert subprocess.run(command, cwd=target, check=True, capture_output=True).stderr == b""
    assert contents(target)["lib/a.py"] == "zero\none\nnew\ntwo\nthree\n"
    with pytest.raises(PatchError, match="foreign"):
        fitting(read_sets(root), target, None)


def test_a_result_with_another_hash_changes_nothing(root: Path, target: Path) -> None:
    pins = root / "thing/1.0/pins.toml"
    pins.write_text(pins.read_text().replace(digest(AFTER["lib/b.py"]), digest("other")))
    chosen = fitting(read_sets(root), target, None)
    with pytest.raises(PatchError, match=r"0002-change\.patch: lib/b\.py came out with another"):
        change(chosen, target, revert=False)
    assert contents(target) == BEFORE


def test_a_file_that_cannot_be_written_changes_nothing(
    root: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copyfile

    def failing(source: Path, to: Path, **options: bool) -> None:
        if str(to).endswith("b.py.new"):
            raise OSError("disk full")
        copy(source, to, **options)

    monkeypatch.setattr(patches.shutil, "copyfile", failing)
    with pytest.raises(PatchError, match="disk full; nothing was changed"):
        change(fitting(read_sets(root), target, None), target, revert=False)
    assert contents(target) == BEFORE


def test_a_git_checkout_is_a_target_too(root: Path, target: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=target, check=True)
    change(fitting(read_sets(root), target, None), target, revert=False)
    assert {path: (target / path).read_text() for path in AFTER} == AFTER


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('file = "0001-change.patch"', 'file = "0003-change.patch"', "the folder holds"),
        ('path = "lib/b.py"', 'path = "lib/a.py"', "two patches change the same file"),
        ('path = "lib/b.py"', 'path = "lib/c.py"', "not its pins' targets"),
        (digest(BEFORE["lib/a.py"]), "abc", "a pin is no sha256"),
    ],
)
def test_pins_that_do_not_agree_are_refused(root: Path, old: str, new: str, message: str) -> None:
    pins = root / "thing/1.0/pins.toml"
    pins.write_text(pins.read_text().replace(old, new))
    with pytest.raises(PatchError, match=message):
        read_sets(root)


def test_the_command(
    root: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patches, "read_sets", lambda: read_sets(root))
    assert main(["list"]) == 0
    assert main(["check"]) == 0
    assert "thing/1.0" in capsys.readouterr().out
    assert main(["apply", "--target", str(target)]) == 0
    shown = capsys.readouterr().out
    assert "changed: 0001-change.patch, 0002-change.patch" in shown
    assert "thing/1.0 0002-change.patch: applied (f2)" in shown
    assert main(["check", "--target", str(target), "--upstream", "else"]) == 1
    assert "--upstream: else is not one of thing/1.0" in capsys.readouterr().err
    assert main(["revert", "--target", str(target / "none")]) == 1
    assert contents(target) == AFTER


# -- the published packages ------------------------------------------------------------------------


def published(name: str, to: Path) -> Path:
    """megatron-core's files as they were published, in `to`."""
    wanted = name.removeprefix("megatron-core/")
    if wanted == INSTALLED:
        # Found and not imported: the learner's tests must be the first to import it.
        (folder,) = find_spec("megatron").submodule_search_locations
        shutil.copytree(
            folder,
            to / "megatron",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        return to
    if find_spec("triton") is None:
        pytest.skip(f"{name} imports triton, which is not installed")
    if WHEELS is None:
        pytest.skip(f"MEGATRON_GMC_WHEELS does not name a folder with the wheel of {name}")
    (wheel,) = Path(WHEELS).glob(f"megatron_core-{wanted}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to)
    return to


def reproduce(name: str, package: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(package), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.patches.reproductions", name],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", ["megatron-core/0.16.1", "megatron-core/0.19.2"])
def test_each_patch_on_the_published_package(name: str, tmp_path: Path) -> None:
    """D5: what is wrong before is right after; revert gives the published files back."""
    package = published(name, tmp_path)
    chosen = fitting(read_sets(), package, None)
    assert chosen.name == name
    broken = json.loads(reproduce("adamw_step", package).stdout)
    assert len(broken) > 1
    assert set(broken) != {2.0}
    if name == "megatron-core/0.16.1":
        assert "NameError: name 'te_general_gemm'" in reproduce("router", package).stderr
    change(chosen, package, revert=False)
    assert set(chosen.states(package).values()) == {"applied"}
    assert json.loads(reproduce("adamw_step", package).stdout) == [2.0] * len(broken)
    if name == "megatron-core/0.16.1":
        assert json.loads(reproduce("router", package).stdout) < 1e-5
    change(chosen, package, revert=True)
    assert set(chosen.states(package).values()) == {"ready"}
