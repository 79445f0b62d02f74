"""TRL's asynchronous trainer on a CPU, for `python -m tests.integrations.trl_async_runs`.

Its engine is an HTTP server and its attention a CUDA kernel. Both sides of the engine are
protocols, so a queue of ready samples and no transfer stand in; the kernel's contract is computed
by torch. The samples' log-probs are those of a policy that never was: weights must hold for any.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from megatron_gmc.estimators import GMC
from megatron_gmc.integrations.trl_async import AsyncGMCTrainer

EPSILON, G, GROUPS, STEPS, TEMPERATURE = 0.2, 4, 3, 4, 1.25


class Samples:
    """A rollout worker whose samples are all there."""

    def __init__(self, samples: list[RolloutSample]) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("the trainer asked for more samples than there are")


class NoTransfer:
    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class Attention:
    """Variable-length attention as the kernel defines it: the causal mask ends at both ends."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: int, softmax_scale: float,
        **__: object,
    ) -> Tensor:  # fmt: skip
        out = torch.empty_like(q)
        repeat = q.size(1) // k.size(1)
        for i in range(len(cu_q) - 1):
            rows, columns = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
            keys, values = (x[columns].repeat_interleave(repeat, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * softmax_scale
            later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(
                scores.size(2) - scores.size(1) + 1
            )
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, values)
        return out


def samples() -> list[RolloutSample]:
    """Whole groups one after the other, with advantages that sum to 0."""
    rng = np.random.default_rng(0)
    made = []
    # Two steps more than are trained on: the loader reads ahead.
    for group in range(GROUPS * (STEPS + 2)):
        prompt = rng.integers(0, 10, 5)
        rewards = rng.random(G)
        for advantage in rewards - rewards.mean():
            completion = rng.integers(0, 16, rng.integers(3, 9))
            ids = np.concatenate([prompt, completion])
            made.append(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=ids,
                    completion_mask=np.arange(len(ids)) >= len(prompt),
                    old_log_probs=np.where(
                        np.arange(len(ids)) >= len(prompt), -rng.exponential(2.8, len(ids)), 0.0
                    ).astype(np.float32),
                    advantage=float(advantage),
                    model_version=0,
                    group_id=100 + group,
                    metrics={"reward": 0.0},
                )
            )
    return made


class Check(TrainerCallback):
    """Compares each step's gradient with −Σ w A Σ log π over the number of trained tokens."""

    def __init__(self, policy: Path) -> None:
        self.plain = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
        self.trainer: Any = None
        self.records: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        step, count = len(self.records), G * GROUPS
        batch = samples()[step * count : (step + 1) * count]
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        actual = {name: p.grad.clone() for name, p in model.named_parameters()}
        self.plain.load_state_dict(model.state_dict())
        self.plain.zero_grad()
        mass = self._formula(batch)
        expected = {name: p.grad for name, p in self.plain.named_parameters()}
        difference = sum(float((actual[n] - expected[n]).square().sum()) for n in actual)
        norm = sum(float(expected[n].square().sum()) for n in actual)
        self.records.append({"error": math.sqrt(difference / norm), "mass": mass})

    def _formula(self, batch: list[RolloutSample]) -> float:
        tokens = sum(int(sample.completion_mask.sum()) for sample in batch)
        masses = []
        for group in sorted({sample.group_id for sample in batch}):
            members = [sample for sample in batch if sample.group_id == group]
            values = [self._log_prob(sample) for sample in members]
            ratios = [
                math.exp(float(value.detach()) - math.fsum(sample.old_log_probs.tolist()))
                for value, sample in zip(values, members, strict=True)
            ]
            masses.append(sum(ratios) / G)
            shrink = min(1.0, (1 + EPSILON) / masses[-1])
            for value, ratio, sample in zip(values, ratios, members, strict=True):
                (-shrink * ratio * sample.advantage / tokens * value).backward()
        return sum(masses) / len(masses)

    def _log_prob(self, sample: RolloutSample) -> Tensor:
        ids = torch.tensor(sample.input_ids)[None]
        logits = self.plain(input_ids=ids, use_cache=False).logits[0, :-1].double()
        picked = torch.log_softmax(logits / TEMPERATURE, -1).gather(1, ids[0, 1:, None])[:, 0]
        return picked[torch.tensor(sample.completion_mask[1:])].sum()


def build(policy: Path, output: Path, **changes: Any) -> AsyncGMCTrainer:
    """The trainer; its kernel, its look at a GPU's speed and its HTTP client are replaced."""
    packing._flash_attn = Attention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    async_grpo_trainer.VLLMClient = lambda *_: None
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    settings: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": G * GROUPS // ranks,
        "num_generations": G,
        "token_budget": 0,
        "max_staleness": STEPS,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "temperature": TEMPERATURE,
        "dtype": "auto",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "logging_steps": 1,
        "dataloader_pin_memory": False,
    }
    return AsyncGMCTrainer(
        model=str(policy),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=AsyncGRPOConfig(**(settings | changes)),
        train_dataset=Dataset.from_dict({"prompt": ["1+1="] * 64}),
        processing_class=AutoTokenizer.from_pretrained(policy),
        rollout_worker=Samples(samples()),
        weight_transfer=NoTransfer(),
        estimator=GMC(epsilon=EPSILON),
    )


def save_policy(task: Path, folder: Path) -> Path:
    """Random weights beside the task's tokenizer."""
    config = AutoConfig.from_pretrained(task / "policy", initializer_range=0.1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder)
    AutoTokenizer.from_pretrained(task / "policy").save_pretrained(folder)
    return folder


def run(policy: str, output: str) -> None:
    """All steps; the records of rank r go to OUTPUT/rank{r}.json."""
    torch.set_num_threads(1)
    trainer = build(Path(policy), Path(output))
    check = Check(Path(policy))
    check.trainer = trainer
    trainer.add_callback(check)
    trainer.train()
    result = {"steps": check.records, "log": trainer.state.log_history[:-1]}
    rank, ranks = (os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE"))
    Path(output, f"{ranks}.rank{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
