"""Where each run of a sweep stands, from its files alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_gmc.run_folder import RunFolder, write_atomically
from megatron_gmc.sweep.config import PlannedRun

State = Literal["finished", "failed", "running", "waiting"]

_REASON_LINES = 3


@dataclass(frozen=True)
class SweepFolder:
    """configs/NAME.yaml, runs/NAME, logs/NAME.log and, of failed runs, failed/NAME.json."""

    path: Path

    def config(self, name: str) -> Path:
        return self.path / "configs" / f"{name}.yaml"

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.path / "runs" / name)

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def _failure(self, name: str) -> Path:
        return self.path / "failed" / f"{name}.json"

    def state(self, name: str) -> State:
        """Of a run that no process of this sweep is busy with."""
        if self.run(name).finished():
            return "finished"
        return "failed" if self._failure(name).exists() else "waiting"

    def reason(self, name: str) -> str:
        """Why a failed run failed, in a line or two."""
        return str(json.loads(self._failure(name).read_text(encoding="utf-8"))["reason"])

    def record_failure(self, name: str, exit_code: int) -> None:
        """Note that a run ended without a result; its own last words are the reason."""
        self._failure(name).parent.mkdir(parents=True, exist_ok=True)
        record = {"exit_code": exit_code, "reason": self._last_words(name, exit_code)}
        write_atomically(self._failure(name), json.dumps(record, indent=2) + "\n")

    def forget_failure(self, name: str) -> None:
        self._failure(name).unlink(missing_ok=True)

    def prepare(self, name: str) -> bool:
        """Make room for a run to start or go on; returns whether it resumes a checkpoint.

        What an earlier start left without a checkpoint is removed: the sweep made it.
        """
        folder = self.run(name)
        if folder.last_checkpoint() is not None:
            return True
        shutil.rmtree(folder.path, ignore_errors=True)
        return False

    def _last_words(self, name: str, exit_code: int) -> str:
        if exit_code < 0:
            return f"killed by signal {-exit_code}"
        lines = self.log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        said = errors[-1:] or [line for line in lines if line.strip()][-_REASON_LINES:]
        return f"exit code {exit_code}: {' | '.join(said) or 'it said nothing'}"


def counted(folder: SweepFolder, runs: Sequence[PlannedRun]) -> dict[State, int]:
    states = [folder.state(run.name) for run in runs]
    return {state: states.count(state) for state in ("finished", "failed", "waiting")}
