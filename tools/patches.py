"""Source patches of upstream packages: list them, and check, apply or revert them on a folder.

    python tools/patches.py list
    python tools/patches.py check                                     # this repository's own files
    python tools/patches.py check  --target DIR [--upstream NAME]
    python tools/patches.py apply  --target DIR [--upstream NAME]
    python tools/patches.py revert --target DIR [--upstream NAME]

DIR is a git checkout, or the site-packages folder of an installed wheel; NAME is an upstream, or an
upstream and version (`megatron-core/0.16.1`), and is found from the files' hashes if not given.

A patch holds no lines of context, so it fits anywhere: what keeps it safe is that every file's
sha256 must be the pinned one before, and after. All patches of a set are applied to a copy, hashed,
and only then moved into place; a set that is applied already is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "patches"


class PatchError(Exception):
    """Why nothing was changed."""


@dataclass(frozen=True)
class Target:
    """A file that a patch changes, and its sha256 before and after."""

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class Patch:
    """One change; what its fields mean is said in pins.toml."""

    file: Path
    feature: str
    reason: str
    link: str
    drop: str
    targets: tuple[Target, ...]

    def state(self, folder: Path) -> str:
        """ready, applied, foreign (another hash) or absent (a file is missing)."""
        files = [folder / target.path for target in self.targets]
        if not all(file.is_file() for file in files):
            return "absent"
        hashes = [sha256(file) for file in files]
        if hashes == [target.before for target in self.targets]:
            return "ready"
        return "applied" if hashes == [target.after for target in self.targets] else "foreign"


@dataclass(frozen=True)
class PatchSet:
    """The patches of one version of an upstream."""

    upstream: str
    version: str
    patches: tuple[Patch, ...]

    @property
    def name(self) -> str:
        return f"{self.upstream}/{self.version}"

    def states(self, folder: Path) -> dict[str, str]:
        return {patch.file.name: patch.state(folder) for patch in self.patches}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_sets(root: Path = ROOT) -> list[PatchSet]:
    """All sets under `root`; raises PatchError for pins that do not agree with their patches."""
    sets = []
    for pins in sorted(root.glob("*/*/pins.toml")):
        entries = tomllib.loads(pins.read_text())["patch"]
        patches = tuple(
            Patch(
                file=pins.parent / entry["file"],
                targets=tuple(Target(**target) for target in entry["target"]),
                **{name: entry[name] for name in ("feature", "reason", "link", "drop")},
            )
            for entry in entries
        )
        found = PatchSet(pins.parent.parent.name, pins.parent.name, patches)
        _check_set(found, pins.parent)
        sets.append(found)
    return sets


def _check_set(found: PatchSet, folder: Path) -> None:
    named = [patch.file.name for patch in found.patches]
    present = sorted(path.name for path in folder.glob("*.patch"))
    if sorted(named) != present:
        raise PatchError(f"{found.name}: pins.toml names {named}, the folder holds {present}")
    paths = [target.path for patch in found.patches for target in patch.targets]
    if len(set(paths)) != len(paths):
        raise PatchError(f"{found.name}: two patches change the same file")
    for patch in found.patches:
        if not patch.file.with_suffix(".md").is_file():
            raise PatchError(f"{patch.file.name}: no {patch.file.stem}.md says what it is for")
        lines = patch.file.read_text().splitlines()
        changed = [line[6:] for line in lines if line.startswith("+++ b/")]
        if changed != [target.path for target in patch.targets]:
            raise PatchError(
                f"{patch.file.name}: changes {changed}, which are not its pins' targets"
            )
        for target in patch.targets:
            if not all(re.fullmatch("[0-9a-f]{64}", h) for h in (target.before, target.after)):
                raise PatchError(f"{patch.file.name}: {target.path}: a pin is no sha256")


def fitting(sets: Sequence[PatchSet], folder: Path, upstream: str | None) -> PatchSet:
    """The set whose every file has a pinned hash in `folder`; raises PatchError without one."""
    if not folder.is_dir():
        raise PatchError(f"--target: {folder} is not a folder")
    candidates = [s for s in sets if upstream in (None, s.upstream, s.name)]
    if not candidates:
        known = ", ".join(sorted(s.name for s in sets))
        raise PatchError(f"--upstream: {upstream} is not one of {known}")
    fits = [
        s for s in candidates if all(v in ("ready", "applied") for v in s.states(folder).values())
    ]
    if len(fits) == 1:
        return fits[0]
    if fits:
        names = ", ".join(s.name for s in fits)
        raise PatchError(f"{folder} holds files of {names}; choose one with --upstream")
    lines = [
        f"  {s.name}: " + ", ".join(f"{name} {state}" for name, state in s.states(folder).items())
        for s in candidates
    ]
    raise PatchError(
        "\n".join([f"{folder} holds no version that these patches were made for:", *lines])
    )


def change(chosen: PatchSet, folder: Path, *, revert: bool) -> list[str]:
    """Apply or revert what is not yet; returns the names of the patches that this changed.

    Nothing in `folder` is touched before every new file has its pinned hash. Raises PatchError.
    """
    wanted, end = ("applied", "before") if revert else ("ready", "after")
    todo = [patch for patch in chosen.patches if patch.state(folder) == wanted]
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        for patch in todo:
            for target in patch.targets:
                (copy / target.path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(folder / target.path, copy / target.path)
            _run_git(patch, copy, revert=revert)
            for target in patch.targets:
                if sha256(copy / target.path) != getattr(target, end):
                    raise PatchError(f"{patch.file.name}: {target.path} came out with another hash")
        _move_in([target.path for patch in todo for target in patch.targets], copy, folder)
    return [patch.file.name for patch in todo]


def _run_git(patch: Patch, folder: Path, *, revert: bool) -> None:
    command = [
        "git",
        "apply",
        "--unidiff-zero",
        *(["--reverse"] if revert else []),
        str(patch.file),
    ]
    # Outside of any repository, or git would look for the files in the one above.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise PatchError(f"{patch.file.name}: git apply: {done.stderr.strip()}")


def _move_in(paths: Sequence[str], copy: Path, folder: Path) -> None:
    """Replace files by their copies; puts all of them back if one cannot be replaced."""
    kept = {path: (folder / path).read_bytes() for path in paths}
    done: list[str] = []
    try:
        for path in paths:
            new = folder / f"{path}.new"
            try:
                # A new file, so that another link to the old one (a package cache) keeps it.
                shutil.copyfile(copy / path, new)
                shutil.copymode(folder / path, new)
                new.replace(folder / path)
            finally:
                new.unlink(missing_ok=True)
            done.append(path)
    except OSError as error:
        for path in done:
            (folder / path).write_bytes(kept[path])
        raise PatchError(f"{error}; nothing was changed") from error


def show(sets: Sequence[PatchSet]) -> None:
    for found in sets:
        print(found.name)
        for patch in found.patches:
            print(f"  {patch.file.name}")
            for title in ("feature", "reason", "link", "drop"):
                print(f"    {title:8} {getattr(patch, title)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("list", "check", "apply", "revert"))
    parser.add_argument("--target", type=Path, help="git checkout or site-packages folder")
    parser.add_argument("--upstream", help="NAME or NAME/VERSION, as `list` shows them")
    options = parser.parse_args(arguments)
    if options.target is None and options.action in ("apply", "revert"):
        parser.error(f"{options.action} needs --target DIR")
    try:
        sets = read_sets()
        if options.action == "list":
            show(sets)
        elif options.target is None:
            print(f"{sum(len(s.patches) for s in sets)} patches agree with their pins")
        else:
            chosen = fitting(sets, options.target, options.upstream)
            if options.action != "check":
                changed = change(chosen, options.target, revert=options.action == "revert")
                print(f"changed: {', '.join(changed) or 'nothing'}")
            for patch in chosen.patches:
                state = patch.state(options.target)
                print(f"{chosen.name} {patch.file.name}: {state} ({patch.feature})")
    except PatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
