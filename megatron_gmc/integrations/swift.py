"""ms-swift's GRPO trainer with group-level weights, put in by an external plugin.

    # gmc_plugin.py, for: swift rlhf --rlhf_type grpo --external_plugins gmc_plugin.py …
    from megatron_gmc.estimators import GMC
    from megatron_gmc.integrations.swift import install

    install(GMC(epsilon=0.2))

The weights are those at the start of the generation batch's training: with one optimizer step a
batch they are exact, with several swift's clip covers the steps after the first.
"""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import torch
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
from swift.trainers.trainer_factory import TrainerFactory

from megatron_gmc.estimators import GMC, AnyEstimator
from megatron_gmc.integrations.folding import check_estimator, fold, log_ratio_sums
from megatron_gmc.integrations.gathering import gather_over
from megatron_gmc.integrations.hosts import check_signature, check_version, refuse

TRIED = ("4.6",)
AGGREGATION = {
    "dr_grpo": "token sum, over trajectories × max_completion_length",
    "grpo": "trajectory mean",
    "dapo": "token mean",
}

check_version("ms-swift", TRIED)
check_signature("ms-swift", GRPOTrainer._postprocess_batch, ("samples", "batch_encoded_inputs"))


class GroupWeights(GRPOTrainer):  # type: ignore[misc, unused-ignore]
    """ms-swift's `GRPOTrainer` with weights; raises ValueError for settings that do not fit."""

    estimator: ClassVar[AnyEstimator] = GMC()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("ms-swift", wrong_settings(kwargs["args"]))
        super().__init__(*args, **kwargs)

    def _postprocess_batch(self, samples: list[Any], batch_encoded_inputs: list[Any]) -> None:
        """ms-swift's advantages, weighted; the metrics go to its own."""
        super()._postprocess_batch(samples, batch_encoded_inputs)
        if not self.model.training:
            return
        if self.dynamic_num_samples:
            raise ValueError("a rollout gave several samples; a trajectory must be one sample")
        batches = [encoded["grpo_batch"] for encoded in batch_encoded_inputs]
        if any(batch.rollout_per_token_logps is None for batch in batches):
            raise ValueError(
                "rollout_logprobs: the rollout brought no behaviour log-probs; use vLLM, which does"
            )
        log_ratio_N = torch.cat(
            [
                log_ratio_sums(
                    batch.old_per_token_logps, batch.rollout_per_token_logps, batch.completion_mask
                )
                for batch in batches
            ]
        )
        chunks = self.split_by_mini_batches(samples)
        group_N = torch.tensor(
            [_number(sample.prompt_id) for chunk in chunks for sample in chunk],
            device=log_ratio_N.device,
        )
        weight_N, metrics = fold(
            torch.ones_like(log_ratio_N),
            log_ratio_N,
            group_N,
            self.estimator,
            gather_over(),
        )
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        parts = weight_N.split([len(batch.advantages) for batch in batches])
        for batch, weight in zip(batches, parts, strict=True):
            batch.advantages = batch.advantages * weight[:, None].to(batch.advantages)


def install(estimator: AnyEstimator) -> None:
    """Make `GroupWeights` with this method what `--rlhf_type grpo` trains with."""
    check_estimator(estimator)
    GroupWeights.estimator = estimator
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.{GroupWeights.__name__}"


def wrong_settings(args: Any) -> dict[str, str]:
    """Setting → what it must be and why, for each that is otherwise."""
    own = "it is a second correction"
    mean = "the ratios' mean would not be 1"
    found = {
        "rollout_importance_sampling_mode": (args.rollout_importance_sampling_mode, (None,), own),
        "off_policy_sequence_mask_delta": (args.off_policy_sequence_mask_delta, (None,), own),
        "use_vllm": (args.use_vllm, (True,), "no other engine brings behaviour log-probs"),
        "loss_type": (args.loss_type, tuple(AGGREGATION), "the others weight by themselves"),
        "beta": (args.beta, (0, 0.0), "a KL term on lagging samples is biased without the weights"),
        "advantage_reweight": (args.advantage_reweight, (None, "none"), "it weights tokens"),
        "top_p": (args.top_p, (1.0, None), mean),
        "top_k": (args.top_k, (-1, 0, None), mean),
        "min_p": (args.min_p, (0.0, None), mean),
        "repetition_penalty": (args.repetition_penalty, (1.0, None), mean),
        "overlong_filter": (args.overlong_filter, (False,), "the group's mass needs every member"),
    }
    return {
        name: f"must be {' or '.join(map(str, right))}, got {value}: {why}"
        for name, (value, right, why) in found.items()
        if value not in right
    }


def _number(label: str) -> int:
    """A label as an integer that is the same on every rank."""
    if not label:
        raise ValueError("prompt_id: a sample has none")
    digest = hashlib.blake2b(label.encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)
