"""A `rollout_func` for TRL that samples from the policy of some optimizer steps ago.

For experiments on the lag without an inference server: it keeps the weights of the last versions
in memory, each a whole copy, and samples with transformers' own generation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, TrainerCallback
from trl import GRPOTrainer

Weights = dict[str, Tensor]


class LaggedRollout(TrainerCallback):
    """Samples with version max(first, t − lag) at version t; evaluation samples with t itself.

    lag counts optimizer steps. `first` is the version at the first rollout: 0, or where a resumed
    run goes on, which therefore starts on-policy. Several optimizer steps on one generation raise
    the lag of the later ones, which `lag/mean` of the metrics shows.

    One instance belongs to one trainer. Raises ValueError for a negative lag, and for a model whose
    weights are spread over ranks (FSDP, DeepSpeed): each rank keeps and samples with all of them.
    """

    def __init__(self, lag: int):
        if lag < 0:
            raise ValueError(f"lag must be 0 or more optimizer steps, got {lag}")
        self.lag = lag
        self.version = 0
        """Of the weights that sampled last."""
        self._versions: dict[int, Weights] = {}

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[list[Any]]]:
        """TRL's rollout protocol: prompt ids, completion ids and behaviour log-probs."""
        if not self._versions:
            self._begin(trainer)
        model, now = trainer.accelerator.unwrap_model(trainer.model), trainer.state.global_step
        training = model.training
        sampled = max(min(self._versions), now - self.lag) if training else now
        if training:
            self.version = sampled
        prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
        # The trainer's own model, because TRL replaces its forward by one that is tied to it.
        try:
            model.load_state_dict(self._versions[sampled])
            completions, log_probs = sample(model.eval(), prompt_ids, trainer)
        finally:
            model.load_state_dict(self._versions[now])
            model.train(training)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": log_probs}

    def on_step_end(self, args: object, state: Any, control: object, **kwargs: Any) -> None:
        """Keep the version that the step made, and forget those that no rollout will ask for."""
        self._keep(state.global_step, kwargs["model"])

    def _begin(self, trainer: GRPOTrainer) -> None:
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError("LaggedRollout needs the whole model on every rank, no FSDP")
        self._keep(trainer.state.global_step, trainer.model)
        trainer.add_callback(self)

    def _keep(self, version: int, model: PreTrainedModel) -> None:
        self._versions[version] = {
            name: value.detach().clone() for name, value in model.state_dict().items()
        }
        for old in [v for v in self._versions if v < version - self.lag]:
            del self._versions[old]


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompt_ids: list[list[int]], trainer: GRPOTrainer
) -> tuple[list[list[int]], list[list[float]]]:
    """One completion a prompt and its log-probs, at the trainer's temperature and length.

    The end-of-sequence token belongs to the completion.
    """
    tokenizer = trainer.processing_class
    ends = trainer.eos_token_ids
    inputs = tokenizer.pad({"input_ids": prompt_ids}, padding_side="left", return_tensors="pt")
    inputs = inputs.to(model.device)
    output = model.generate(
        **inputs,
        generation_config=GenerationConfig(
            max_new_tokens=trainer.max_completion_length,
            do_sample=True,
            temperature=trainer.temperature,
            top_k=0,
            top_p=1.0,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=ends,
            pad_token_id=tokenizer.pad_token_id,
            return_dict_in_generate=True,
            output_logits=True,
        ),
    )
    new_NT = output.sequences[:, inputs["input_ids"].size(1) :]
    completions: list[list[int]] = [[] for _ in prompt_ids]
    log_probs: list[list[float]] = [[] for _ in prompt_ids]
    running = set(range(len(prompt_ids)))
    for token_N, logits_NV in zip(new_NT.T, output.logits, strict=True):
        scaled_NV = logits_NV.float() / trainer.temperature
        chosen_N = torch.log_softmax(scaled_NV, -1).gather(1, token_N[:, None])[:, 0]
        for row in sorted(running):
            completions[row].append(int(token_N[row]))
            log_probs[row].append(float(chosen_N[row]))
        running = {row for row in running if completions[row][-1] not in ends}
    return completions, log_probs
