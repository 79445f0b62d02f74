"""Small real runs that the run-level tests share: their data, configs, commands and records."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from megatron_gmc.trajectory_record import read_records
from tests.distributed import ROOT, free_port

Tree = dict[str, object]

# Metrics that depend on how fast things went, or on what else was sampled meanwhile.
_CLOCKED = ("time/", "rollout/", "throughput/")
# A whole run takes seconds; a busy machine may stretch them.
TIMEOUT_S = 240


def make_task(folder: Path, seed: int = 0) -> Path:
    """The demo's data in small, in `folder`, with random weights in `folder`/policy.

    The weights are drawn wide, so that the policy is far from uniform and log-ratios spread.
    """
    from megatron_gmc.convert.hf_config import load_shape
    from megatron_gmc.convert.hugging_face import write_folder
    from megatron_gmc.learner.model_weights import initial_weights

    make_data = ROOT / "examples/arithmetic_cpu/make_data.py"
    sizes = {"--prompts": 64, "--held-out": 16, "--demonstrations": 24, "--seed": seed}
    arguments = [str(part) for pair in sizes.items() for part in pair]
    with mock.patch.object(sys, "argv", [str(make_data), str(folder), *arguments]):
        runpy.run_path(str(make_data), run_name="__main__")
    edit_json(folder / "model" / "config.json", initializer_range=0.2)
    shape = load_shape(folder / "model")
    write_folder(folder / "policy", initial_weights(shape, seed), folder / "model")
    return folder


def edit_json(path: Path, **changes: object) -> None:
    """Change fields of a JSON object in a file; None removes the field."""
    tree = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in tree.items() if v is not None}))


def train_tree(task: Path, output: Path, **changes: dict[str, object]) -> Tree:
    """A training config at exact lag 2: warm-up, a checkpoint at 2, 4 and 6, evaluations.

    `changes` gives fields to change by section.
    """
    tree: dict[str, dict[str, object]] = {
        "train": {
            "output_dir": str(output),
            "steps": 6,
            "prompts_per_step": 2,
            "save_every": 2,
            "keep_checkpoints": 9,
            "save_trajectories": 1,
        },
        "policy": {"path": str(task / "policy")},
        "task": {
            "source": {"type": "jsonl", "path": str(task / "prompts.jsonl")},
            "held_out_source": {"type": "jsonl", "path": str(task / "heldout.jsonl")},
            "grader": {"type": "function", "path": "tests.reward:even_digits"},
        },
        "rollout": {
            "group_size": 4,
            "max_response_tokens": 12,
            "temperature": 0.7,
            "lag": {"exact": 2},
        },
        "optim": {"lr": 1e-3, "warmup_steps": 4},
        "evaluation": {"every": 3, "prompts": 8},
    }
    return tree | {name: tree.get(name, {}) | change for name, change in changes.items()}


def sft_tree(task: Path, output: Path) -> Tree:
    """A supervised config; with SGD, which does not blow rounding up as AdamW may."""
    return {
        "train": {"output_dir": str(output), "steps": 4, "batch_size": 6},
        "policy": {"path": str(task / "model"), "initial": "random"},
        "data": {"path": str(task / "demonstrations.jsonl")},
        "optim": {
            "name": "sgd",
            "lr": 0.05,
            "momentum": 0.9,
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "clip_grad": 2.0,
        },
    }


def write_config(path: Path, tree: Mapping[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(tree)))
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "megatron_gmc", *map(str, arguments)]


def environment(rank: int | None = None, world: int = 1, port: int = 0) -> dict[str, str]:
    """What a command of megatron_gmc is started with: alone, or as a rank as torchrun does it."""
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    alone |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    if rank is None:
        return alone
    return alone | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_alone(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in a process of its own."""
    return subprocess.run(
        command(*arguments),
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def completed(*arguments: str | Path) -> str:
    """Run a command that must succeed, in a process of its own; what it printed."""
    done = run_alone(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start_ranks(world: int, log: Path, *arguments: str | Path) -> list[subprocess.Popen[bytes]]:
    """Start a command on `world` ranks, each leading a process group of its own."""
    port = free_port()
    ranks = []
    for rank in range(world):
        with log.with_suffix(f".rank{rank}").open("ab") as output:
            ranks.append(
                subprocess.Popen(
                    command(*arguments),
                    env=environment(rank, world, port) if world > 1 else environment(),
                    cwd=ROOT,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
    return ranks


def engine_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    """The embedded engine of a run's rank 0."""
    children = psutil.Process(process.pid).children(recursive=True)
    (engine,) = [one for one in children if "megatron_gmc.rollout.embedded" in one.cmdline()]
    return engine


def end_world() -> None:
    """Leave the process groups of a command that failed in this process."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def wait_until(ready: Callable[[], bool], ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait while the ranks run; AssertionError where one ends before, or none gets there."""
    deadline = time.monotonic() + TIMEOUT_S
    while not ready():
        ended = [rank.returncode for rank in ranks if rank.poll() is not None]
        assert not ended, f"ended with {ended}"
        assert time.monotonic() < deadline, "not there yet"
        time.sleep(0.01)


def roll_back(run: Path, target: Path, version: int) -> None:
    """Copy a finished run as a crash right after a checkpoint would have left it."""
    kept = f"step_{version:06d}"

    def newer(folder: str, names: list[str]) -> set[str]:
        inside = Path(folder).relative_to(run)
        if inside == Path():
            return set(names) & {"result.json", "plot.png", "huggingface"}
        return {name for name in names if inside == Path("checkpoints") and name != kept}

    shutil.copytree(run, target, ignore=newer)


def records(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of each version of a run; where a resumed run wrote one again, the last.

    Clocks are left out: what stays is the same in every run that does the same.
    """
    steps: dict[int, dict[str, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        values = {k: v for k, v in entry.items() if not k.startswith(_CLOCKED)}
        steps.setdefault(values.pop("step"), {}).update(values)
    return steps


def assert_same_weights(left: Path, right: Path) -> None:
    """Bit by bit, of two finished runs."""
    ours, theirs = final_weights(left), final_weights(right)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def trajectories(run: Path, step: int) -> list[dict[str, Any]]:
    """What a run recorded of the groups that one of its steps consumed."""
    rows: list[dict[str, Any]] = read_records(run, step).to_pylist()
    return rows


def final_weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "huggingface" / "model.safetensors")
