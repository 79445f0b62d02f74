"""The folder of one run: what is in it, and whether a command may start, resume or has finished.

config.yaml      the resolved config          metrics.jsonl   one JSON object per step
versions.json    what produced the run        tensorboard/    the same, as event files
checkpoints/     step_000050, …               huggingface/    the last weights
trajectories/    consumed groups, if asked    resumes.jsonl   where each resumed run went on
weights/         hand-over to the engines     result.json     written last: the run finished
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import yaml
from pydantic import BaseModel

import megatron_gmc
from megatron_gmc.errors import ConfigError
from megatron_gmc.settings import dump_config

_PACKAGES = ("torch", "megatron-core", "transformers", "safetensors", "numpy")
# What a resumed run may change: none of these alters which samples are drawn or learned from.
_FREE_ON_RESUME = (
    "train.save_every",
    "train.keep_checkpoints",
    "train.output_dir",
    "train.resume",
    "train.stall_timeout_s",
    "train.save_trajectories",
    "train.wandb",
    "mesh.",
    "learner.",
    "evaluation.",
    "rollout.start_timeout_s",
    "rollout.request_timeout_s",
    "rollout.sglang",
    "rollout.fleet",
    "weights.",
)


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def resumes(self) -> Path:
        return self.path / "resumes.jsonl"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def huggingface(self) -> Path:
        return self.path / "huggingface"

    def finished(self) -> bool:
        return self.result.exists()

    def holds_a_run(self) -> bool:
        return self.config.exists()

    def checkpoint(self, version: int) -> Path:
        """Where the checkpoint of `version` is, or will be."""
        return self.checkpoints / f"step_{version:06d}"

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that was committed."""
        found = self.complete_checkpoints()
        return found[-1] if found else None

    def open(self, config: BaseModel, *, resume: bool, resumable: bool = True) -> None:
        """Make the folder for a new run, or check that it may be resumed. Raises ConfigError.

        `resumable` says whether the command has --resume at all.
        """
        if resume:
            self.check_same(config)
            return
        if self.holds_a_run():
            last = self.last_checkpoint()
            state = f"its last checkpoint is {last.name}" if last else "it has no checkpoint"
            raise ConfigError(
                f"train.output_dir: {self.path} holds another run that has not finished ({state}); "
                f"{'continue it with --resume, ' if resumable else ''}remove it, or choose another "
                "folder"
            )
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError(
                f"train.output_dir: {self.path} is not an empty folder; choose a new one"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"train.output_dir: {self.path} cannot be made: {error.strerror}"
            ) from error
        write_atomically(self.config, dump_config(config))
        write_atomically(self.path / "versions.json", json.dumps(_provenance(), indent=2) + "\n")

    def check_same(self, config: BaseModel) -> None:
        """Refuse a config that would not have made the run in this folder. Raises ConfigError."""
        if not self.holds_a_run():
            raise ConfigError(
                f"train.output_dir: {self.path} holds no run to resume; leave --resume out"
            )
        before = flatten(yaml.safe_load(self.config.read_text()))
        now = flatten(yaml.safe_load(dump_config(config)))
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key) and not key.startswith(_FREE_ON_RESUME):
                raise ConfigError(
                    f"{key}: {now.get(key)!r}, but the run in {self.path} was started with "
                    f"{before.get(key)!r}; resume with that, or start a new run in another folder"
                )

    def drop_old_checkpoints(self, keep: int) -> None:
        """Remove all but the `keep` newest complete checkpoints."""
        for folder in self.complete_checkpoints()[:-keep]:
            shutil.rmtree(folder)

    def complete_checkpoints(self) -> list[Path]:
        """Oldest first; one that is being written has another name."""
        return sorted(self.checkpoints.glob("step_" + "[0-9]" * 6))


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader, or a crash, sees the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def flatten(tree: object, prefix: str = "") -> dict[str, object]:
    """A nested config as dotted keys, in the config's order."""
    if not isinstance(tree, dict):
        return {prefix.removesuffix("."): tree}
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.")
    return flat


def _provenance() -> dict[str, str]:
    return {
        "megatron_gmc": megatron_gmc.__version__,
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
        "commit": _commit(),
    }


def _commit() -> str:
    """The source's commit, with + where it has changes; empty where it is not a checkout."""
    source = Path(__file__).resolve().parent
    git = shutil.which("git")
    if git is None:
        return ""
    described = subprocess.run(
        [git, "-C", str(source), "describe", "--always", "--dirty=+", "--abbrev=40"],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip()
