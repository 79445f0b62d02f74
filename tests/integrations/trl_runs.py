"""Small runs of TRL's trainer with weights, and what each gradient must have been.

`python -m tests.integrations.trl_runs run TASK OUTPUT CASE…` runs cases one after the other, on one
rank or several, and writes one record for each optimizer step. The expectation is the policy
gradient's formula on plain transformers logits: groups are found by their prompt, rewards are
computed again from the tokens.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megatron_gmc.estimators import GMC
from megatron_gmc.integrations.trl import GMCTrainer
from megatron_gmc.integrations.trl_rollout import LaggedRollout

EPSILON = 0.2
G = 4
LENGTH = 8
TEMPERATURE = 1.25


@dataclass(frozen=True)
class Case:
    """How a run is laid out."""

    lag: int = 0
    rows: int = 8
    """Trajectories a micro-batch and rank."""
    accumulate: int = 1
    slices: int = 1
    """Micro-batches that a generation is cut into."""
    iterations: int = 1
    steps: int = 6
    loss_type: str = "dr_grpo"
    lr: float = 5e-4


CASES = {
    "lag0": Case(),
    "lag4": Case(lag=4),
    "slices": Case(lag=4, rows=4, accumulate=2, slices=4, iterations=2, steps=12),
    "trajectory_mean": Case(lag=2, loss_type="grpo", steps=4),
    "token_mean": Case(lag=2, loss_type="dapo", steps=4),
    # 6 trajectories a rank in groups of 4: one group lies on both, and each optimizer step takes
    # half of each rank's.
    "straddling": Case(lag=4, rows=3, slices=2, steps=8),
}


def reward_of(ids: list[int]) -> float:
    """Share of even tokens: differs between most completions, also of a random policy."""
    return sum(token % 2 == 0 for token in ids) / len(ids)


def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [reward_of(ids) for ids in completion_ids]


class Recorder(GRPOTrainer):
    """Stands behind the adapter: sees TRL's batches and no weight."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        slice_ = super()._prepare_inputs(generation_batch)
        self.window.append(slice_)
        self.generation = self._buffered_inputs
        return slice_


class Trainer(GMCTrainer, Recorder):
    def __init__(self, **kwargs: Any) -> None:
        self.window: list[dict[str, Any]] = []
        super().__init__(**kwargs)


def policy(task: Path) -> Any:
    """Random weights, in float64 so that rounding does not hide a wrong formula."""
    config = AutoConfig.from_pretrained(task / "policy", initializer_range=0.1)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def build(task: Path, output: Path, case: Case, **changes: Any) -> Trainer:
    """The trainer of a case; `changes` go to its config or, by these names, to the trainer."""
    kwargs = {name: changes.pop(name) for name in ("rollout_func", "estimator") if name in changes}
    prompts = [json.loads(line)["prompt"] for line in (task / "prompts.jsonl").open()]
    settings: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": case.rows,
        "gradient_accumulation_steps": case.accumulate,
        "steps_per_generation": case.slices,
        "num_iterations": case.iterations,
        "num_generations": G,
        "max_steps": case.steps,
        "max_completion_length": LENGTH,
        "learning_rate": case.lr,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "temperature": TEMPERATURE,
        "loss_type": case.loss_type,
        "scale_rewards": "none",
        "vllm_importance_sampling_correction": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "seed": 5,
    }
    return Trainer(
        model=policy(task),
        reward_funcs=reward,
        args=GRPOConfig(**(settings | changes)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(task / "policy"),
        **({"rollout_func": LaggedRollout(case.lag), "estimator": GMC(epsilon=EPSILON)} | kwargs),
    )


def trajectories(slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of TRL's batches without padding."""
    rows = []
    for part in slices:
        for i in range(len(part["completion_ids"])):
            prompt = part["prompt_ids"][i][part["prompt_mask"][i].bool()].tolist()
            kept = part["completion_mask"][i].bool()
            rows.append(
                {
                    "prompt": prompt,
                    "completion": part["completion_ids"][i][kept].tolist(),
                    "behaviour": part["sampling_per_token_logps"][i][kept].tolist(),
                }
            )
    return rows


def everywhere(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not dist.is_initialized():
        return rows
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, rows)
    return [row for part in parts for row in part]


def log_prob(model: Any, row: dict[str, Any]) -> Tensor:
    """Sum over the completion's tokens, float64, from the logits of one unpadded sequence."""
    ids = torch.tensor([row["prompt"] + row["completion"]])
    first = len(row["prompt"])
    logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1].double()
    picked = torch.log_softmax(logits / TEMPERATURE, -1).gather(1, ids[0, first:, None])
    return picked.sum()


class Check(TrainerCallback):
    """Compares each step's accumulated gradient with the formula, just before the optimizer."""

    def __init__(self, case: Case, task: Path) -> None:
        self.trainer: Trainer | None = None
        self.case = case
        self.plain = policy(task)
        self.records: list[dict[str, Any]] = []

    def on_pre_optimizer_step(self, *_: object, **kwargs: Any) -> None:
        assert self.trainer is not None
        whole = everywhere(trajectories(self.trainer.generation))
        window = everywhere(trajectories(self.trainer.window))
        self.trainer.window.clear()
        actual = {n: p.grad.clone() for n, p in self.trainer.model.named_parameters()}
        self.plain.load_state_dict(self.trainer.model.state_dict())
        self.plain.zero_grad()
        mass = self.formula(whole, window)
        expected = {n: p.grad for n, p in self.plain.named_parameters()}
        difference = math.sqrt(sum(float((actual[n] - expected[n]).square().sum()) for n in actual))
        norm = math.sqrt(sum(float(expected[n].square().sum()) for n in actual))
        self.records.append({"error": difference / norm, "mass": mass})

    def formula(self, whole: list[dict[str, Any]], window: list[dict[str, Any]]) -> float:
        """Backward of −(1/B) Σ w A Σ log π / T_max through plain transformers; the mean mass."""
        groups: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        for row in whole:
            groups.setdefault(tuple(row["prompt"]), []).append(row)
        masses, shrink, mean = [], {}, {}
        for key, rows in groups.items():
            assert len(rows) == G, "two groups of one prompt, or a group that is cut"
            with torch.no_grad():
                ratios = [
                    math.exp(float(log_prob(self.plain, r)) - math.fsum(r["behaviour"]))
                    for r in rows
                ]
            masses.append(sum(ratios) / G)
            shrink[key] = min(1.0, (1 + EPSILON) / masses[-1])
            mean[key] = sum(reward_of(r["completion"]) for r in rows) / G
        tokens = sum(len(row["completion"]) for row in window)
        for row in window:
            key = tuple(row["prompt"])
            value = log_prob(self.plain, row)
            ratio = math.exp(float(value.detach()) - math.fsum(row["behaviour"]))
            weight = ratio * shrink[key]
            advantage = reward_of(row["completion"]) - mean[key]
            denominator = {
                "dr_grpo": len(window) * LENGTH,
                "grpo": len(window) * len(row["completion"]),
                "dapo": tokens,
            }[self.case.loss_type]
            (-weight * advantage / denominator * value).backward()
        return sum(masses) / len(masses)


def run(task: str, output: str, *names: str) -> None:
    """Each case's records and TRL's log, from rank r to OUTPUT/CASE.rank{r}.json."""
    torch.set_num_threads(1)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    for name in names:
        trainer = build(Path(task), Path(output), CASES[name])
        check = Check(CASES[name], Path(task))
        check.trainer = trainer
        trainer.add_callback(check)
        trainer.train()
        result = {"steps": check.records, "log": trainer.state.log_history[:-1]}
        rank = os.environ.get("RANK", "0")
        Path(output, f"{name}.rank{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
