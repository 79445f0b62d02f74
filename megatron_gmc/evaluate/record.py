"""An evaluation's folder: finished prompts as they come, so that an interrupted one goes on.

config.yaml     the resolved config           samples.jsonl   one line a finished prompt
subject.json    what was evaluated            evaluation.json the results, written last
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import yaml

from megatron_gmc.errors import ConfigError
from megatron_gmc.evaluate.config import EvaluateConfig
from megatron_gmc.evaluate.statistics import Outcome
from megatron_gmc.run_folder import flatten, write_atomically
from megatron_gmc.settings import dump_config

# They do not change what is sampled.
_FREE = (
    "output_dir",
    "engine.start_timeout_s",
    "sampling.calls",
    "sampling.k",
    "sampling.pass_reward",
    "sampling.request_timeout_s",
    "grader_workers",
)

Done = dict[tuple[str, int], Outcome]
"""Outcomes by task and place of the prompt."""


@dataclass(frozen=True)
class EvaluationFolder:
    path: Path

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "evaluation.json"

    def open(self, config: EvaluateConfig) -> None:
        """Claim the folder for `config`, or go on in one of the same. Raises ConfigError."""
        kept = self.path / "config.yaml"
        if kept.exists():
            _check_same(
                flatten(yaml.safe_load(kept.read_text(encoding="utf-8"))),
                flatten(yaml.safe_load(dump_config(config))),
                self.path,
            )
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError(f"output_dir: {self.path} is not an empty folder; choose a new one")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, dump_config(config))
        except OSError as error:
            raise ConfigError(
                f"output_dir: {self.path} cannot be written: {error.strerror}"
            ) from error

    def check_subject(self, subject: Mapping[str, object]) -> None:
        """Refuse to go on with other weights or prompts than the folder's. Raises ConfigError."""
        path = self.path / "subject.json"
        if not path.exists():
            write_atomically(path, json.dumps(subject, indent=2) + "\n")
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        for key in sorted(before.keys() | subject.keys()):
            if before.get(key) != subject.get(key):
                raise ConfigError(
                    f"output_dir: {self.path} holds samples of another {key.replace('_', ' ')}; "
                    "choose another folder"
                )

    def finished(self) -> Done:
        """What samples.jsonl holds; a last line that was cut off is dropped from the file."""
        if not self.samples.exists():
            return {}
        written = self.samples.read_bytes()
        whole = written[: written.rfind(b"\n") + 1]
        if len(whole) < len(written):
            os.truncate(self.samples, len(whole))
        done: Done = {}
        for line in whole.decode("utf-8").splitlines():
            entry = json.loads(line)
            votes = entry["votes"]
            done[entry["task"], entry["place"]] = Outcome(
                entry["prompt_id"],
                tuple(entry["rewards"]),
                tuple(entry["tokens"]),
                tuple(entry["truncated"]),
                None if votes is None else tuple(votes),
            )
        return done


def append(file: TextIO, task: str, place: int, outcome: Outcome) -> None:
    """One finished prompt as a line."""
    file.write(json.dumps({"task": task, "place": place, **asdict(outcome)}) + "\n")


def _check_same(before: Mapping[str, object], now: Mapping[str, object], path: Path) -> None:
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and key not in _FREE:
            raise ConfigError(
                f"{key}: {now.get(key)!r}, but the evaluation in {path} was started with "
                f"{before.get(key)!r}; go on with that, or choose another output_dir"
            )
