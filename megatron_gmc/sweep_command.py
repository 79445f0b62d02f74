"""`sweep`: a grid of training runs, on this machine or as a SLURM array."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from megatron_gmc.errors import ConfigError
from megatron_gmc.report.payload import cells
from megatron_gmc.run_folder import write_atomically
from megatron_gmc.run_record import ACCURACY, RunRecord
from megatron_gmc.settings import dump_config
from megatron_gmc.sweep.config import PlannedRun, SweepConfig, planned_runs
from megatron_gmc.sweep.local import run_all
from megatron_gmc.sweep.slurm import write_array
from megatron_gmc.sweep.state import SweepFolder, counted

_SHOWN_WAITING = 5


def sweep(config: SweepConfig, *, jobs: int, retry_failed: bool, slurm: bool) -> int:
    """Run what has not finished; returns the exit code, 1 where a run has failed.

    Finished runs are skipped, failed ones are listed and run again only with `retry_failed`, those
    that were interrupted go on. `slurm` writes an array script instead of running anything.
    Raises ConfigError before any run starts.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {jobs}")
    runs = planned_runs(config)
    folder = SweepFolder(config.output_dir)
    _write_configs(folder, runs)
    skipped = ("finished",) if retry_failed else ("finished", "failed")
    todo = [run for run in runs if folder.state(run.name) not in skipped]
    console = Console(highlight=False, markup=False)
    before = ", ".join(f"{count} {state}" for state, count in counted(folder, runs).items())
    console.print(f"{len(runs)} runs in {folder.path}: {before}", soft_wrap=True)
    if slurm:
        if not todo:
            raise ConfigError(f"{folder.path}: no run is left for an array job")
        script = write_array(folder, todo, jobs, config.slurm)
        console.print(f"wrote {script}: {len(todo)} runs; submit it with sbatch", soft_wrap=True)
        return 0
    if todo:
        _run(folder, runs, todo, jobs, console)
    console.print(table(folder, runs, frozenset()))
    _write_results(folder, runs)
    return _list_failures(folder, runs, console)


def _run(
    folder: SweepFolder,
    runs: Sequence[PlannedRun],
    todo: Sequence[PlannedRun],
    jobs: int,
    console: Console,
) -> None:
    if not console.is_terminal:
        # A log file gets a line for each run that ends instead of a table that redraws itself.
        told: set[str] = set()

        def say(busy: frozenset[str]) -> None:
            for run in todo:
                if run.name not in told and run.name not in busy:
                    state = folder.state(run.name)
                    if state in ("finished", "failed"):
                        told.add(run.name)
                        console.print(f"{run.name}: {state}", soft_wrap=True)

        run_all(folder, todo, jobs, say)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        run_all(
            folder,
            todo,
            jobs,
            lambda busy: live.update(table(folder, runs, busy, short=True), refresh=True),
        )


def table(
    folder: SweepFolder, runs: Sequence[PlannedRun], busy: frozenset[str], *, short: bool = False
) -> Table:
    """All runs with their states; `short` leaves finished ones and most waiting ones out."""
    shown = Table("run", "state", "step", "held-out accuracy", "retained mass", "sd(ℓ)")
    hidden = {"finished": 0, "waiting": 0}
    for run in runs:
        state = "running" if run.name in busy else folder.state(run.name)
        if short and (state == "finished" or (state == "waiting" and _enough(shown))):
            hidden[state] += 1
            continue
        shown.add_row(run.name, state, *_progress(folder, run))
    if short:
        rest = ", ".join(f"{count} {state}" for state, count in hidden.items() if count)
        shown.caption = f"and {rest}" if rest else None
    return shown


def _enough(shown: Table) -> bool:
    return shown.row_count >= _SHOWN_WAITING


def _progress(folder: SweepFolder, run: PlannedRun) -> tuple[str, str, str, str]:
    path = folder.run(run.name)
    if not path.config.exists():
        return f"0/{run.config.train.steps}", "–", "–", "–"
    record = RunRecord.read(path.path)
    values = (
        record.last(ACCURACY),
        record.mean("ratio/retained_mass"),
        record.mean("ratio/log_ratio_sd"),
    )
    first, second, third = ("–" if value is None else f"{value:.3f}" for value in values)
    return f"{record.step}/{record.steps}", first, second, third


def _write_configs(folder: SweepFolder, runs: Sequence[PlannedRun]) -> None:
    """Each run's config in full. Raises ConfigError where one is another than before."""
    for run in runs:
        path, text = folder.config(run.name), dump_config(run.config)
        changed = path.exists() and path.read_text(encoding="utf-8") != text
        if changed and folder.run(run.name).config.exists():
            raise ConfigError(
                f"output_dir: {folder.path} holds run {run.name} with another config ({path}); "
                "choose another folder, or remove the run"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)


def _write_results(folder: SweepFolder, runs: Sequence[PlannedRun]) -> None:
    """results.json: one row a run and one a cell, with what made them."""
    finished = [run for run in runs if folder.run(run.name).finished()]
    records = [RunRecord.read(folder.run(run.name).path) for run in finished]
    if not records:
        return
    rows = [
        {
            "run": run.name,
            "method": record.method,
            "lag": record.lag,
            "seed": record.seed,
            "accuracy": record.series.get(ACCURACY, []),
            "collapsed": record.collapsed,
            "retained_mass": record.mean("ratio/retained_mass"),
            "log_ratio_sd": record.mean("ratio/log_ratio_sd"),
            "commit": record.versions.get("commit"),
        }
        for run, record in zip(finished, records, strict=True)
    ]
    path = folder.path / "results.json"
    write_atomically(path, json.dumps({"runs": rows, "cells": cells(records)}, indent=1) + "\n")


def _list_failures(folder: SweepFolder, runs: Sequence[PlannedRun], console: Console) -> int:
    failed = [run.name for run in runs if folder.state(run.name) == "failed"]
    for name in failed:
        console.print(f"{name} failed, {folder.reason(name)}", soft_wrap=True)
        console.print(f"  {folder.log(name)}", soft_wrap=True)
    if failed:
        console.print(
            f"{len(failed)} of {len(runs)} runs failed; --retry-failed runs them again",
            soft_wrap=True,
        )
        return 1
    console.print(
        f"results: {folder.path / 'results.json'}; megatron-gmc report {folder.path}",
        soft_wrap=True,
    )
    return 0
