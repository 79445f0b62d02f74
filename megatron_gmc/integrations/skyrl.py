"""SkyRL's trainer with group-level weights, put in by an entry script of five lines.

    from skyrl.train.entrypoints.main_base import BasePPOExp
    from megatron_gmc.estimators import GMC
    from megatron_gmc.integrations.skyrl import with_weights

    class Experiment(with_weights(BasePPOExp, GMC(epsilon=0.2))): ...

The driver has the whole batch when it computes advantages; there the weights go in. They are those
at the start of the batch's training: with one optimizer step a batch they are exact, with several
SkyRL's clip covers the steps after the first.
"""

from __future__ import annotations

from typing import Any

import torch
from skyrl.train.trainer import RayPPOTrainer

from megatron_gmc.estimators import GMC, AnyEstimator
from megatron_gmc.integrations.folding import check_estimator, log_ratio_sums
from megatron_gmc.integrations.hosts import check_signature, check_version, refuse
from megatron_gmc.integrations.rows import row_weights

TRIED = ("0.3",)
AGGREGATION = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm")
"""SkyRL's `loss_reduction`: token mean, trajectory mean, token sum over a constant."""

check_version("skyrl", TRIED)
check_signature("skyrl", RayPPOTrainer.compute_advantages_and_returns, ("data",))


class GroupWeights(RayPPOTrainer):  # type: ignore[misc, unused-ignore]
    """`RayPPOTrainer` with weights; `estimator` (default `GMC()`) is the one argument more.

    Raises ValueError for settings that do not go with the weights, before anything is built.
    """

    def __init__(self, cfg: Any, *args: Any, estimator: AnyEstimator | None = None, **kwargs: Any):
        self._estimator: AnyEstimator = GMC() if estimator is None else estimator
        check_estimator(self._estimator)
        refuse("SkyRL", wrong_settings(cfg))
        super().__init__(cfg, *args, **kwargs)

    def compute_advantages_and_returns(self, data: Any) -> Any:
        """SkyRL's advantages, weighted; the metrics go to SkyRL's tracker."""
        for name in ("action_log_probs", "rollout_logprobs"):
            if data.get(name) is None:
                raise ValueError(f"{name}: SkyRL's batch has none, and the ratios need it")
        data = super().compute_advantages_and_returns(data)
        rows = len(data["advantages"])
        padded = data.metadata.get("pad_size", 0)
        log_ratio_R = log_ratio_sums(
            data["action_log_probs"], data["rollout_logprobs"], data["loss_mask"]
        )
        weight_R, metrics = row_weights(
            log_ratio_R,
            self._trajectories(data, rows),
            [str(uid) for uid in data.metadata["uids"]],
            [row < rows - padded for row in range(rows)],
            self._estimator,
        )
        self.all_metrics.update(metrics)
        data["advantages"] = data["advantages"] * weight_R[:, None].to(data["advantages"])
        return data

    def _trajectories(self, data: Any, rows: int) -> list[int]:
        """A number for each row's trajectory: of several rows where each turn is one."""
        if not self.cfg.generator.step_wise_trajectories:
            return list(range(rows))
        last_R = torch.tensor(data.metadata["is_last_step"], dtype=torch.int64)
        numbers: list[int] = (last_R.cumsum(0) - last_R).tolist()
        return numbers


def with_weights(experiment: type[Any], estimator: AnyEstimator) -> type[Any]:
    """An entry class of SkyRL (`BasePPOExp` or yours) whose trainer is `GroupWeights`."""
    check_estimator(estimator)

    class Weighted(experiment):
        def get_trainer(self, cfg: Any, *args: Any, **kwargs: Any) -> GroupWeights:
            return GroupWeights(cfg, *args, estimator=estimator, **kwargs)

    return Weighted


def wrong_settings(cfg: Any) -> dict[str, str]:
    """Setting → what it must be and why, for each that is otherwise."""
    algorithm, sampling = cfg.trainer.algorithm, cfg.generator.sampling_params
    correction = algorithm.off_policy_correction
    own = "it is SkyRL's own correction"
    kl = "a KL term on lagging samples is biased without the weights"
    found = {
        "trainer.algorithm.policy_loss_type": (
            algorithm.policy_loss_type,
            "regular",
            "the others are not linear in the advantage",
        ),
        "trainer.algorithm.use_kl_loss": (algorithm.use_kl_loss, False, kl),
        "trainer.algorithm.use_kl_in_reward": (algorithm.use_kl_in_reward, False, kl),
        "generator.sampling_params.top_p": (
            sampling.top_p, 1.0, "the ratios' mean would not be 1"
        ),
        "generator.sampling_params.top_k": (
            sampling.top_k, -1, "the ratios' mean would not be 1"
        ),
    }  # fmt: skip
    switches = (
        "tis_ratio_type",
        "sequence_mask_metric",
        "outlier_token_is_threshold_low",
        "outlier_token_is_threshold_high",
        "token_mask_is_threshold_low",
        "token_mask_is_threshold_high",
    )
    for name in switches:
        value = getattr(correction, name)
        found[f"trainer.algorithm.off_policy_correction.{name}"] = (value, None, own)
    wrong = {
        name: f"must be {right}, got {value}: {why}"
        for name, (value, right, why) in found.items()
        if value != right
    }
    if sampling.logprobs is None:
        wrong["generator.sampling_params.logprobs"] = "must be set: the ratios need them"
    if algorithm.loss_reduction not in AGGREGATION:
        wrong["trainer.algorithm.loss_reduction"] = f"must be one of {', '.join(AGGREGATION)}"
    return wrong
