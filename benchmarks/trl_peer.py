"""One run of TRL for against_trl.py: `python benchmarks/trl_peer.py SETTINGS.json`.

Stock `GRPOTrainer` or the one with weights, on the arithmetic task, sampling with the weights of
some steps ago. Writes seconds and trained tokens of each step, and the policy.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megatron_gmc.estimators import GMC
from megatron_gmc.integrations.trl import GMCTrainer
from megatron_gmc.integrations.trl_rollout import LaggedRollout


class Clock(TrainerCallback):
    """Seconds from the end of one optimizer step to that of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    output = Path(settings["output"])
    tokenizer = AutoTokenizer.from_pretrained(settings["policy"])

    def reward(completion_ids: list[list[int]], answer: list[str], **_: object) -> list[float]:
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return [
            float(ids[-1] == tokenizer.eos_token_id and text.rpartition(">")[2] == right)
            for ids, text, right in zip(completion_ids, texts, answer, strict=True)
        ]

    lines = Path(settings["prompts"]).read_text().splitlines()
    trajectories = settings["prompts_per_step"] * settings["group_size"]
    config = GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=trajectories,
        num_generations=settings["group_size"],
        max_steps=settings["steps"],
        max_completion_length=settings["max_response_tokens"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        temperature=1.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        seed=settings["seed"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    clock = Clock()
    common: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(settings["policy"], dtype=torch.float32),
        "reward_funcs": reward,
        "args": config,
        "train_dataset": Dataset.from_list([json.loads(line) for line in lines]),
        "processing_class": tokenizer,
        "callbacks": [clock],
        "rollout_func": LaggedRollout(settings["lag"]),
    }
    weighted = settings["weights"]
    trainer = GMCTrainer(**common, estimator=GMC()) if weighted else GRPOTrainer(**common)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    record = {
        "seconds": [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)],
        "tokens": [trajectories * entry["completions/mean_length"] for entry in log],
    }
    trainer.save_model(str(output / "policy"))
    tokenizer.save_pretrained(output / "policy")
    (output / "steps.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
