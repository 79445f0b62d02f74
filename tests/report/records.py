"""Runs' folders written by hand, for tests that need more than a small run shows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import pyarrow as pa
import yaml
from pyarrow import parquet

HOSTILE = (
    '</script><script>window.hostile=1</script><img src=x onerror="window.hostile=2">&lt;b&gt;'
)

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("version", pa.int64()),
        ("group", pa.int64()),
        ("member", pa.int64()),
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("tokens", pa.list_(pa.int64())),
        ("behaviour_log_probs", pa.list_(pa.float32())),
        ("log_probs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int64())),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("weight", pa.float64()),
        ("log_ratio", pa.float64()),
        ("lag", pa.int64()),
        ("finish_reason", pa.string()),
    ]
)


def settings(**changes: object) -> dict[str, object]:
    """A resolved config's tree, as far as reports and watching read it."""
    tree: dict[str, object] = {
        "train": {"output_dir": "somewhere", "steps": 40, "prompts_per_step": 4, "seed": 0},
        "policy": {"path": "nowhere"},
        "rollout": {"group_size": 8, "lag": {"exact": 4, "bounded": None}},
        "estimator": {"name": "gmc", "epsilon": 0.2},
        "objective": {"advantage": "leave_one_out", "aggregation": "token_sum"},
        "optim": {"name": "adamw", "lr": 3e-4, "clip_grad": None},
    }
    for key, value in changes.items():
        section, _, field = key.partition("__")
        inner = tree[section]
        assert isinstance(inner, dict)
        tree[section] = {**inner, field: value} if field else value
    return tree


def write_run(
    folder: Path,
    metrics: Sequence[Mapping[str, float | str]],
    *,
    finished: bool = True,
    tree: Mapping[str, object] | None = None,
) -> Path:
    """A run's folder with these lines of metrics.jsonl."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(tree or settings())))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (folder / "versions.json").write_text(json.dumps({"torch": "2.13.0"}))
    if finished:
        (folder / "result.json").write_text("{}")
    return folder


def course(steps: int, seed: int = 0, **last: float) -> list[dict[str, float | str]]:
    """Lines of an invented run; `last` fixes metrics in every step."""
    rng = Random(seed)
    lines: list[dict[str, float | str]] = [{"step": 0, "evaluation/accuracy": 0.4}]
    for step in range(1, steps + 1):
        mass = rng.gauss(0, 0.3)
        lag = min(step - 1, 4)
        line: dict[str, float | str] = {
            "step": step,
            "reward/mean": 0.4 + 0.5 * step / steps + rng.gauss(0, 0.03),
            "grad_norm": math.exp(rng.gauss(1, 0.5)),
            "throughput/tokens_per_s": 9000.0,
            "response/mean_tokens": 24.0,
            "response/truncated_share": 0.02,
            "ratio/log_mass_p10": mass - 0.4,
            "ratio/log_mass_p50": mass,
            "ratio/log_mass_p90": mass + 0.4,
            "ratio/log_mass_max": mass + 0.9,
            "ratio/retained_mass": 0.9,
            "ratio/ess": 0.7,
            "ratio/capped_share": 0.3,
            "ratio/largest_share": 0.3,
            "ratio/log_ratio_sd": 0.2 * lag + 0.01,
            "lag/mean": float(lag),
            "lag/min": float(lag),
            "lag/max": float(lag),
            f"lag/share_{lag}": 1.0,
            "time/wait_s": 0.1,
            "time/learn_s": 0.3,
            "time/publish_s": 0.02,
            "time/step_s": 0.45,
            "rollout/engine_busy_s": 0.35,
            "rollout/engine_idle_s": 0.1,
            "rollout/switch_s": 0.02,
            "rollout/tokens_per_s": 10000.0,
            "rollout/queue_groups": 12.0,
        }
        lines.append(line | last)
        if step % 10 == 0:
            lines.append({"step": step, "evaluation/accuracy": 0.4 + 0.5 * step / steps})
            lines.append({"step": step, "time/checkpoint_s": 0.5})
    return lines


def trajectory_rows(steps: int, groups: int, members: int, text: str) -> list[dict[str, object]]:
    """Rows of a trajectory record whose responses are `text`, one token a character."""
    rng = Random(1)
    rows: list[dict[str, object]] = []
    for step in range(1, steps + 1):
        for group in range(groups):
            for member in range(members):
                ratios = [rng.gauss(0, 0.3) for _ in text]
                behaviour = [-rng.random() for _ in text]
                reward = float(rng.random() < 0.5)
                switch = len(text) // 2
                rows.append(
                    {
                        "step": step,
                        "version": step - 1,
                        "group": (step - 1) * groups + group,
                        "member": member,
                        "prompt_id": f"prompts.jsonl:{group}",
                        "prompt": f"{group:03}+585=",
                        "response": text,
                        "tokens": [ord(character) % 20 for character in text],
                        "behaviour_log_probs": behaviour,
                        "log_probs": [b + r for b, r in zip(behaviour, ratios, strict=True)],
                        "versions": [0] * switch + [1] * (len(text) - switch),
                        "reward": reward,
                        "advantage": reward - 0.5,
                        "weight": math.exp(min(sum(ratios), math.log(1.2))),
                        "log_ratio": sum(ratios),
                        "lag": step - 1,
                        "finish_reason": "stop" if reward else "length",
                    }
                )
    return rows


def write_trajectories(run: Path, rows: Sequence[Mapping[str, object]], name: str = "a") -> None:
    (run / "trajectories").mkdir(exist_ok=True)
    table = pa.Table.from_pylist([dict(row) for row in rows], SCHEMA)
    parquet.write_table(table, run / "trajectories" / f"{name}.parquet")
