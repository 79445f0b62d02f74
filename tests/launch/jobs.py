"""Jobs of a test's cluster: rendered, queued, waited for."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from megatron_gmc.launch.command import slurm
from tests.distributed import ROOT

TIMEOUT_S = 200.0


def submit(folder: Path, config: Path, commands: dict[str, str], **options: object) -> str:
    """Render and queue the job of `config`; returns its number."""
    script = folder / "job.sh"
    assert slurm(config, [], {"nodes": 2, "name": folder.name} | options, script) == 0
    queued = subprocess.run(
        ["sbatch", "--parsable", f"--chdir={folder}", str(script)],
        env=commands | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return queued.stdout.strip()


def state(job: str, commands: dict[str, str]) -> dict[str, str]:
    """What scontrol says of the job."""
    shown = subprocess.run(
        ["scontrol", "show", "job", job], env=commands, capture_output=True, text=True, check=True
    )
    return dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)


def wait_for(ready: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not ready():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


def logs(folder: Path) -> str:
    files = [*folder.glob("slurm-*.out"), *folder.glob("slurm/*/*.log")]
    return "\n".join(f"== {file.name}\n{file.read_text()}" for file in files)


def steps_of(run: Path) -> int:
    record = run / "metrics.jsonl"
    return len(record.read_text().splitlines()) if record.exists() else 0
