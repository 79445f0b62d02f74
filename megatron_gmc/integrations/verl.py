"""verl's trainers with group-level weights, registered by its plugin entry point.

    trainer.v1.trainer_mode=gmc_sync            (gmc_colocate_async, gmc_separate_async)
    actor_rollout_ref.rollout.calculate_log_probs=True
    +trainer.v1.gmc_sync.name=gmc +trainer.v1.gmc_sync.epsilon=0.2          (the default)

The driver has the whole batch when it computes advantages; there the weights go in. They are those
at the start of the batch's training: with one optimizer step a batch they are exact, with several
verl's clip covers the steps after the first.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from tensordict import TensorDict
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from megatron_gmc.estimators import ESTIMATORS
from megatron_gmc.integrations.folding import check_estimator, log_ratio_sums
from megatron_gmc.integrations.hosts import check_signature, check_version, refuse
from megatron_gmc.integrations.rows import row_weights

TRIED = ("0.9",)
AGGREGATION = {
    "seq-mean-token-sum": "token sum",
    "seq-mean-token-mean": "trajectory mean",
    "token-mean": "token mean",
}

logger = logging.getLogger(__name__)

check_version("verl", TRIED)
check_signature("verl", PPOTrainer._compute_advantage, ("batch", "metrics"))
check_signature("verl", trainer_base.response_to_nested, ("tensor", "response_mask"))


class GroupWeights(PPOTrainer):  # type: ignore[misc, unused-ignore]
    """Stands in front of one of verl's trainers; raises ValueError for settings that do not fit."""

    mode: ClassVar[str]
    """verl's own name of the trainer behind it."""

    def __init__(self, config: Any) -> None:
        section = config.trainer.v1.get(f"gmc_{self.mode}", None) or {}
        self._estimator = estimator_of(dict(section))
        refuse("verl", wrong_settings(config))
        # verl asks for this name in many places, to tell its trainers apart.
        with trainer_base.open_dict(config):
            config.trainer.v1.trainer_mode = self.mode
        super().__init__(config)
        kind = AGGREGATION[config.actor_rollout_ref.actor.loss_agg_mode]
        logger.warning("weights: %s; loss: %s", self._estimator, kind)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """verl's advantages, weighted; the metrics go into `metrics`."""
        batch = super()._compute_advantage(batch, metrics)
        fields = ["uid", "response_mask", "rollout_log_probs", "old_log_probs", "advantages"]
        data = trainer_base.tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )
        mask_nested = data["response_mask"]
        padded = data.to_padded_tensor()
        missing = [name for name in fields if padded.get(name, None) is None]
        if missing:
            raise ValueError(f"verl's batch has no {', '.join(missing)}")
        log_ratio_R = log_ratio_sums(
            padded["old_log_probs"], padded["rollout_log_probs"], padded["response_mask"]
        )
        weight_R, found = row_weights(
            log_ratio_R,
            # "uid_session_output": the outputs of one session are one trajectory.
            [key.rsplit("_", 1)[0] for key in batch.keys],
            [str(uid) for uid in padded["uid"]],
            [not tag.get("is_padding", False) for tag in batch.tags],
            self._estimator,
        )
        metrics.update(found)
        weighted = padded["advantages"] * weight_R[:, None].to(padded["advantages"])
        output = {"advantages": trainer_base.response_to_nested(weighted, mask_nested)}
        return trainer_base.tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict(output, batch_size=len(batch.keys)),
        )


def estimator_of(section: dict[str, Any]) -> Any:
    """The method that a config section names, GMC if none; raises ValueError."""
    parameters = {"name": "gmc"} | section
    name = parameters.pop("name")
    if name not in ESTIMATORS:
        raise ValueError(f"name: {name} is no estimator; use one of {', '.join(ESTIMATORS)}")
    try:
        estimator = ESTIMATORS[name](**parameters)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error
    check_estimator(estimator)  # type: ignore[arg-type]
    return estimator


def wrong_settings(config: Any) -> dict[str, str]:
    """Setting → what it must be and why, for each that is otherwise."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    algorithm = config.algorithm
    correction = algorithm.get("rollout_correction", None) or {}
    own = "it is verl's own correction"
    kl = "a KL term on lagging samples is biased without the weights"
    found = {
        "actor_rollout_ref.rollout.calculate_log_probs": (rollout.calculate_log_probs, True, ""),
        "actor_rollout_ref.rollout.top_p": (rollout.top_p, 1, "the ratios' mean would not be 1"),
        "actor_rollout_ref.rollout.top_k": (rollout.top_k, -1, "the ratios' mean would not be 1"),
        "actor_rollout_ref.actor.policy_loss.loss_mode": (
            actor.policy_loss.loss_mode,
            "vanilla",
            "the others are not linear in the advantage",
        ),
        "actor_rollout_ref.actor.use_kl_loss": (actor.use_kl_loss, False, kl),
        "algorithm.use_kl_in_reward": (algorithm.use_kl_in_reward, False, kl),
        "algorithm.rollout_correction.rollout_is": (correction.get("rollout_is"), None, own),
        "algorithm.rollout_correction.rollout_rs": (correction.get("rollout_rs"), None, own),
        "algorithm.rollout_correction.bypass_mode": (
            correction.get("bypass_mode", False),
            False,
            "the log-probs must be the current policy's",
        ),
    }
    wrong = {
        name: f"must be {right}, got {value}" + (f": {why}" if why else "")
        for name, (value, right, why) in found.items()
        if value != right
    }
    if actor.loss_agg_mode not in AGGREGATION:
        known = ", ".join(f"{name} ({what})" for name, what in AGGREGATION.items())
        wrong["actor_rollout_ref.actor.loss_agg_mode"] = f"must be one of {known}"
    return wrong


@register_trainer("gmc_sync")
class GMCSync(GroupWeights, PPOTrainerSync):  # type: ignore[misc, unused-ignore]
    """verl's `sync` trainer with weights."""

    mode = "sync"


@register_trainer("gmc_colocate_async")
class GMCColocateAsync(GroupWeights, PPOTrainerColocateAsync):  # type: ignore[misc, unused-ignore]
    """verl's `colocate_async` trainer with weights."""

    mode = "colocate_async"


@register_trainer("gmc_separate_async")
class GMCSeparateAsync(GroupWeights, PPOTrainerSeparateAsync):  # type: ignore[misc, unused-ignore]
    """verl's `separate_async` trainer with weights."""

    mode = "separate_async"
