"""The same training on the same CPU core: stock TRL, TRL with our weights, our own trainer.

`python benchmarks/against_trl.py` prints a table; `--json FILE` writes it, `--check` exits with 1
and names the bound that was missed. A 75k-parameter Qwen3, 3-digit addition, P = 16, G = 8, the
same exact lag, AdamW, token sum; the weights of a short warm start are made first (or `--policy`).

Each run is a process tree of its own that is pinned to one core, one thread a process: ours has two
processes, learner and engine, and shares the core between them. The runs take turns, and a ratio is
the median over the turns of two runs' values in the same turn. A token counts as trained once, when
the optimizer step that it belongs to ends; the first steps, which load and fill the lag, are left
out. Accuracy is greedy decoding with transformers on held-out prompts, for all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / "benchmarks/trl_peer.py"
ARMS = ("stock TRL", "TRL with weights", "ours")
BOUND = 2.0
"""Least tokens a second of ours, in units of stock TRL's."""
SHAPE = {
    "prompts_per_step": 16,
    "group_size": 8,
    "max_response_tokens": 33,
    "lr": 3e-4,
    "seed": 0,
}


@dataclass(frozen=True)
class Measured:
    """One run."""

    tokens_per_s: float
    seconds_per_step: float
    """Median."""
    peak_mib: float
    """Largest resident memory of the whole process tree; pages that processes share count twice."""
    accuracy: float


def pinned(command: list[str], core: int) -> float:
    """Run the command on one core; returns the largest resident MiB of its process tree."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    peak = 0.0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            ["taskset", "--cpu-list", str(core), *command],
            env=environment,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(0.1)
        if process.returncode != 0:
            log.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{log.read().decode()[-3000:]}")
    return peak / 2**20


def resident(pid: int) -> float:
    """Bytes of a process and all below it."""
    total = 0
    try:
        parent = psutil.Process(pid)
        processes = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # ended while we counted
    return total


def run_trl(folder: Path, data: Path, policy: Path, options: argparse.Namespace, arm: str) -> float:
    settings = SHAPE | {
        "output": str(folder),
        "policy": str(policy),
        "prompts": str(data / "prompts.jsonl"),
        "steps": options.steps,
        "lag": options.lag,
        "weights": arm != "stock TRL",
    }
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, str(PEER), str(folder / "settings.json")]
    return pinned(command, options.core)


def run_ours(folder: Path, data: Path, policy: Path, options: argparse.Namespace) -> float:
    tree = {
        "train": {
            "output_dir": str(folder / "run"),
            "steps": options.steps,
            "prompts_per_step": SHAPE["prompts_per_step"],
            "seed": SHAPE["seed"],
        },
        "policy": {"path": str(policy)},
        "task": {
            "source": {"type": "jsonl", "path": str(data / "prompts.jsonl")},
            "grader": {"type": "exact", "after": ">", "require_stop": True},
        },
        "rollout": {
            "group_size": SHAPE["group_size"],
            "max_response_tokens": SHAPE["max_response_tokens"],
            "lag": {"exact": options.lag},
        },
        "objective": {"advantage": "group_mean"},
        "optim": {"lr": SHAPE["lr"], "weight_decay": 0.0},
    }
    folder.mkdir(parents=True)
    (folder / "train.yaml").write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "megatron_gmc", "train", str(folder / "train.yaml")]
    peak = pinned(command, options.core)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").open()]
    steps = [line for line in lines if "time/step_s" in line]
    trajectories = SHAPE["prompts_per_step"] * SHAPE["group_size"]
    record = {
        "seconds": [line["time/step_s"] for line in steps],
        "tokens": [trajectories * line["response/mean_tokens"] for line in steps],
    }
    (folder / "steps.json").write_text(json.dumps(record))
    (folder / "policy").symlink_to(folder / "run/huggingface")
    return peak


def measure(
    folder: Path, data: Path, policy: Path, options: argparse.Namespace, arm: str
) -> Measured:
    """One run of one arm."""
    if arm == "ours":
        peak = run_ours(folder, data, policy, options)
    else:
        peak = run_trl(folder, data, policy, options, arm)
    record: dict[str, list[float]] = json.loads((folder / "steps.json").read_text())
    assert len(record["seconds"]) == len(record["tokens"]) == options.steps
    seconds, tokens = (record[name][options.lag + 1 :] for name in ("seconds", "tokens"))
    return Measured(
        sum(tokens) / sum(seconds),
        statistics.median(seconds),
        peak,
        accuracy(folder / "policy", data / "heldout.jsonl", options.held_out),
    )


@torch.no_grad()
def accuracy(policy: Path, held_out: Path, prompts: int) -> float:
    """Share of held-out sums that greedy decoding gets right."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    rows = [json.loads(line) for line in held_out.open()][:prompts]
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt")
    first = inputs["input_ids"].size(1)
    output = model.generate(
        inputs["input_ids"], max_new_tokens=SHAPE["max_response_tokens"], do_sample=False
    )
    ended = (output[:, first:] == tokenizer.eos_token_id).any(1).tolist()
    texts = tokenizer.batch_decode(output[:, first:], skip_special_tokens=True)
    right = [
        end and text.rpartition(">")[2] == row["answer"]
        for end, text, row in zip(ended, texts, rows, strict=True)
    ]
    return sum(right) / len(right)


def warm_start(folder: Path) -> Path:
    """A policy that can do some of the sums: a short supervised run of our own."""
    config = ROOT / "examples/arithmetic_cpu/sft.yaml"
    command = [
        *(sys.executable, "-m", "megatron_gmc", "sft", str(config)),
        *("--train.output_dir", str(folder / "warm_start"), "--train.steps", "400"),
        *("--policy.path", str(folder / "data/model"), "--optim.decay_steps", "200"),
        *("--data.path", str(folder / "data/demonstrations.jsonl")),
    ]
    pinned(command, min(os.sched_getaffinity(0)))
    return folder / "warm_start/huggingface"


def rows_of(turns: list[dict[str, Measured]]) -> list[dict[str, Any]]:
    """Medians over the turns, and each arm's tokens per second over stock TRL's."""
    rows = []
    for arm in ARMS:
        runs = [turn[arm] for turn in turns]
        median = {
            name: statistics.median(asdict(run)[name] for run in runs) for name in asdict(runs[0])
        }
        ratio = statistics.median(
            turn[arm].tokens_per_s / turn["stock TRL"].tokens_per_s for turn in turns
        )
        rows.append({"arm": arm, **median, "ratio": ratio, "turns": [asdict(run) for run in runs]})
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--policy", type=Path, help="Hugging Face folder to start from")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run")
    parser.add_argument("--lag", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--held-out", type=int, default=256, help="prompts for the accuracy")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.steps < options.lag + 2:
        parser.error("--repeats must be at least 1, and --steps at least --lag + 2")
    options.core = min(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_data = ROOT / "examples/arithmetic_cpu/make_data.py"
        pinned([sys.executable, str(make_data), str(folder / "data")], options.core)
        policy = options.policy or warm_start(folder)
        before = accuracy(policy, folder / "data/heldout.jsonl", options.held_out)
        turns = [
            {
                arm: measure(folder / f"{turn}-{arm}", folder / "data", policy, options, arm)
                for arm in ARMS
            }
            for turn in range(options.repeats)
        ]
    rows = rows_of(turns)
    print(
        f"{options.steps} steps, lag {options.lag} (exact), one core; accuracy before {before:.3f}"
    )
    print(f"{'':18} {'tokens/s':>9} {'× TRL':>6} {'s/step':>7} {'MiB':>6} {'accuracy':>9}")
    for row in rows:
        print(
            f"{row['arm']:18} {row['tokens_per_s']:9.0f} {row['ratio']:6.2f} "
            f"{row['seconds_per_step']:7.3f} {row['peak_mib']:6.0f} {row['accuracy']:9.3f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    ours = rows[-1]["ratio"]
    if ours < BOUND:
        print(f"missed: ours trains {ours:.2f} × stock TRL's tokens a second, bound {BOUND}")
    return 1 if options.check and ours < BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
