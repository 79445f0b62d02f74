"""TRL's `GRPOTrainer` with group-level weights, formed anew at every optimizer step.

    from megatron_gmc.estimators import GMC
    from megatron_gmc.integrations.trl import GMCTrainer

    trainer = GMCTrainer(..., rollout_func=..., estimator=GMC(epsilon=0.2))

The log-probs that the optimizer step starts from are taken over the whole generation batch, each
group's mass over all ranks, and the weights go into the advantages. TRL's own ratio is 1 in every
step, so its clip never acts, with several slices and several iterations on one generation too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from megatron_gmc.estimators import GMC, AnyEstimator
from megatron_gmc.integrations.folding import check_estimator, fold, log_ratio_sums
from megatron_gmc.integrations.gathering import gather_over
from megatron_gmc.integrations.hosts import check_signature, check_version, refuse
from megatron_gmc.integrations.trl_rollout import LaggedRollout

TRIED = ("1.16",)
AGGREGATION = {
    "dr_grpo": "token sum, over trajectories × max_completion_length",
    "grpo": "trajectory mean",
    "dapo": "token mean",
}
"""What is left of TRL's losses where the ratio is 1, by `loss_type`."""

_GROUP = "group_ids"
_MODEL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)

logger = logging.getLogger(__name__)

check_version("trl", TRIED)
check_signature(
    "trl",
    GRPOTrainer._get_per_token_logps_and_entropies,
    ("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", *_MODEL_INPUTS),
)
check_signature("trl", GRPOTrainer._generate_and_score_completions, ("inputs",))
check_signature("trl", GRPOTrainer._prepare_inputs, ("generation_batch",))


class GMCTrainer(GRPOTrainer):
    """`GRPOTrainer` with weights; `estimator` (default `GMC()`) is the one argument more.

    A trainer of your own takes it as its first base: `class Mine(GMCTrainer, MyTrainer)`.

    Raises ValueError when it is made, naming every setting that does not go with the weights, and
    at the first generation if the rollout brings no log-probs.
    """

    def __init__(self, *args: Any, estimator: AnyEstimator | None = None, **kwargs: Any):
        self._estimator: AnyEstimator = GMC() if estimator is None else estimator
        check_estimator(self._estimator)
        super().__init__(*args, **kwargs)
        refuse("TRL", _wrong_settings(self))
        self._rollout: Callable[..., Any] | None = kwargs.get("rollout_func")
        if self._rollout is not None:
            self.rollout_func = _checked(self._rollout)
        self._weighted: list[Tensor] = []
        # The generation batch and the version that the weights belong to.
        self._weighted_of: list[dict[str, Any]] | None = None
        self._weighted_at = -1
        logger.info("weights: %s; loss: %s", self._estimator, AGGREGATION[self.loss_type])

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with group ids, and without the log-probs that would make its ratio ≠ 1."""
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        if batch.get("sampling_per_token_logps") is None:
            raise ValueError(
                "logprobs: the rollout brought no behaviour log-probs (None); return one list for "
                "each completion, taken at the sampling temperature"
            )
        batch.pop("old_per_token_logps", None)
        rows = len(batch["completion_ids"])
        first = self.accelerator.process_index * rows
        # TRL lays the trajectories of one prompt side by side, over ranks as well.
        row_N = torch.arange(first, first + rows, device=batch["advantages"].device)
        return {**batch, _GROUP: row_N // self.num_generations}

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """TRL's slice with weighted advantages; weights are new after each optimizer step."""
        slice_: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return slice_
        version = self.state.global_step
        if self._weighted_of is not self._buffered_inputs or self._weighted_at != version:
            self._weighted = self._weigh(self._buffered_inputs)
            self._weighted_of, self._weighted_at = self._buffered_inputs, version
        place = self._step % self.args.steps_per_generation
        return {**slice_, "advantages": self._weighted[place]}

    def _weigh(self, slices: list[dict[str, Any]]) -> list[Tensor]:
        """Weighted advantages of the slices of this rank's generation batch; logs the metrics."""
        weighted, metrics = fold(
            torch.cat([part["advantages"] for part in slices]),
            torch.cat([self._log_ratios(part) for part in slices]),
            torch.cat([part[_GROUP] for part in slices]),
            self._estimator,
            gather_over(),
            group_size=self.num_generations,
        )
        if isinstance(self._rollout, LaggedRollout):
            metrics["lag/mean"] = float(self.state.global_step - self._rollout.version)
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        return list(weighted.split([len(part["advantages"]) for part in slices]))

    @torch.no_grad()
    def _log_ratios(self, part: Mapping[str, Any]) -> Tensor:
        ids, mask = part["completion_ids"], part["completion_mask"]
        current, _, _ = self._get_per_token_logps_and_entropies(
            self.model,
            torch.cat([part["prompt_ids"], ids], dim=1),
            torch.cat([part["prompt_mask"], mask], dim=1),
            ids.size(1),
            batch_size=self.args.per_device_train_batch_size,
            **{name: part.get(name) for name in _MODEL_INPUTS},
        )
        if "tool_mask" in part:
            mask = mask.bool() & part["tool_mask"].bool()
        return log_ratio_sums(current, part["sampling_per_token_logps"], mask)


def _checked(rollout: Callable[..., Any]) -> Callable[..., Any]:
    """The rollout, with what TRL would pad with log-prob 0 (probability 1) refused."""

    def checked(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        output: dict[str, Any] = rollout(prompts, trainer)
        if output.get("logprobs") is None:
            return output
        for index, (ids, values) in enumerate(
            zip(output["completion_ids"], output["logprobs"], strict=True)
        ):
            if len(values) != len(ids):
                raise ValueError(
                    f"logprobs: completion {index} has {len(ids)} tokens and {len(values)} "
                    "behaviour log-probs; each token needs its own"
                )
            if any(value is None or not math.isfinite(value) for value in values):
                raise ValueError(
                    f"logprobs: completion {index} has a behaviour log-prob that is missing or not "
                    "finite; sample it again"
                )
        return output

    return checked


def _wrong_settings(trainer: GRPOTrainer) -> dict[str, str]:
    """Setting → what it must be and why, for each that is otherwise."""
    args = trainer.args
    wrong = {}
    if trainer.rollout_func is None and not trainer.use_vllm:
        wrong["rollout_func"] = (
            "needed (or use_vllm), because TRL's own generation brings no behaviour log-probs"
        )
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        wrong["vllm_importance_sampling_correction"] = "must be False, or the lag counts twice"
    if trainer.off_policy_mask_threshold is not None:
        wrong["off_policy_mask_threshold"] = "must be None, it is a second correction"
    if args.delta is not None:
        wrong["delta"] = "must be None, it clips a ratio that the weights already hold"
    if trainer.loss_type not in AGGREGATION:
        known = ", ".join(f"{name} ({what})" for name, what in AGGREGATION.items())
        wrong["loss_type"] = f"must be one of {known}, got {trainer.loss_type}"
    if trainer.beta != 0:
        wrong["beta"] = "must be 0: the KL term of lagging samples is biased without the weights"
    if trainer.mask_truncated_completions:
        wrong["mask_truncated_completions"] = (
            "must be False: a trajectory without its tokens would enter its group's mass as ratio 1"
        )
    return wrong | wrong_sampling({**vars(args), **(args.generation_kwargs or {})})


def wrong_sampling(settings: Mapping[str, Any]) -> dict[str, str]:
    """Sampling settings that would give ratios whose mean is not 1, and what they must be."""
    neutral = {
        "top_p": (None, 1, 1.0),
        "top_k": (None, 0, -1),
        "min_p": (None, 0, 0.0),
        "repetition_penalty": (None, 1, 1.0),
    }
    return {
        name: f"must be {right[1]}, got {settings[name]}: log-probs of a truncated or bent "
        "distribution give ratios whose mean is not 1"
        for name, right in neutral.items()
        if settings.get(name) not in right
    }
