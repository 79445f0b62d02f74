"""A sweep as a SLURM array job: one task for each run that has not finished."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_gmc.run_folder import write_atomically
from megatron_gmc.sweep.config import PlannedRun
from megatron_gmc.sweep.state import SweepFolder

_SCRIPT = """\
#!/bin/bash
# Submit with: sbatch {script}
#SBATCH --job-name=sweep
#SBATCH --array=0-{last}%{jobs}
#SBATCH --output={logs}/%x-%A_%a.log
{settings}\
set -euo pipefail
config=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {list})
run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {runs})
resume=()
if compgen -G "$run/checkpoints/step_*" > /dev/null; then resume=(--resume); fi
exec {python} -m megatron_gmc train "$config" "${{resume[@]}}"
"""


def write_array(
    folder: SweepFolder, runs: Sequence[PlannedRun], jobs: int, settings: Mapping[str, str]
) -> Path:
    """Write the script, and the lists that it reads; returns the script.

    Each task does what a local run does; `jobs` limits how many run at a time.
    """
    base = folder.path.resolve()
    script, configs, places = base / "sweep.sbatch", base / "configs.txt", base / "runs.txt"
    (base / "logs").mkdir(parents=True, exist_ok=True)
    _write_lines(configs, [str(folder.config(run.name).resolve()) for run in runs])
    _write_lines(places, [str(folder.run(run.name).path.resolve()) for run in runs])
    write_atomically(
        script,
        _SCRIPT.format(
            script=shlex.quote(str(script)),
            last=len(runs) - 1,
            jobs=jobs,
            logs=base / "logs",
            settings="".join(f"#SBATCH --{key}={value}\n" for key, value in settings.items()),
            list=shlex.quote(str(configs)),
            runs=shlex.quote(str(places)),
            python=shlex.quote(sys.executable),
        ),
    )
    return script


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    write_atomically(path, "".join(line + "\n" for line in lines))
