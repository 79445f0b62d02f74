"""`report`: one self-contained HTML page about one run, several, or a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import yaml

from megatron_gmc.errors import ConfigError
from megatron_gmc.report.page import render
from megatron_gmc.report.payload import payload
from megatron_gmc.report.pieces import text_pieces
from megatron_gmc.report.trajectories import TOKENS, Pieces, ShownGroup, chosen_groups
from megatron_gmc.run_folder import write_atomically
from megatron_gmc.run_record import RunRecord

REPORT = "report.html"


def report(folders: Sequence[Path], *, output: Path | None, tokens: int | None) -> int:
    """Write the page; returns the exit code.

    `folders` are runs' folders, or folders that hold some, as a sweep's does. The page goes to
    `output`, or into the one folder given, or here. `tokens`: how many tokens of recorded
    trajectories the page may hold. Raises ConfigError where a folder holds no run, or the page
    cannot be written.
    """
    budget = TOKENS if tokens is None else tokens
    if budget < 1:
        raise ConfigError(f"--tokens must be at least 1, got {budget}")
    runs = [RunRecord.read(path) for folder in folders for path in runs_in(folder)]
    names = [str(folder.resolve().name) for folder in folders]
    target = output or (folders[0] / REPORT if len(folders) == 1 else Path(REPORT))
    data = payload(runs)
    data["trajectories"] = _trajectories(runs, budget)
    page = render(f"Report on {', '.join(names)}", data)
    try:
        write_atomically(target, page)
    except OSError as error:
        raise ConfigError(f"--output: {target} cannot be written: {error.strerror}") from None
    print(f"wrote {target}: {len(runs)} run{'s' * (len(runs) > 1)}, {len(page) / 1e6:.1f} MB")
    return 0


def runs_in(folder: Path) -> list[Path]:
    """`folder` itself where it is a run's, else the runs' folders anywhere below it."""
    if (folder / "config.yaml").exists():
        return [folder]
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the folder of a run or of a sweep")
    # What trained nothing, such as a warm start, has no metrics of steps to compare.
    found = sorted(path.parent for path in folder.rglob("config.yaml"))
    runs = [path for path in found if _trains(path / "config.yaml")]
    if not runs:
        raise ConfigError(f"{folder} holds no run: there is no config.yaml of `train` in or below")
    return runs


def _trains(config: Path) -> bool:
    tree = yaml.safe_load(config.read_text(encoding="utf-8"))
    return isinstance(tree, dict) and "rollout" in tree


def _trajectories(runs: Sequence[RunRecord], budget: int) -> list[dict[str, object]]:
    """Each run's chosen groups; all runs that have a record share the budget alike."""
    recorded = [run for run in runs if any((run.path / "trajectories").glob("*.parquet"))]
    share = budget // max(1, len(recorded))
    load = cache(text_pieces)
    shown: list[dict[str, object]] = []
    for run in runs:
        groups: list[ShownGroup] = []
        total = 0
        if run in recorded:
            pieces: Pieces | None = load(Path(str(run.settings.get("policy.path"))))
            groups, total = chosen_groups(run.path, budget=share, pieces=pieces)
        shown.append({"groups": groups, "total": total})
    return shown
