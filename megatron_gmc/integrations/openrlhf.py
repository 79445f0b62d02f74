"""OpenRLHF's experience maker with group-level weights, put into its Ray workers by their start.

    # train.py, in the place of `python -m openrlhf.cli.train_ppo_ray …`
    hook = "megatron_gmc.integrations.openrlhf.install"
    ray.init(runtime_env={"worker_process_setup_hook": hook})
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")

OpenRLHF returns behaviour log-probs only with its own correction on, so that stays on, at token
level; after the weights are formed, the adapter hands it the learner's log-probs as the engine's,
and its token weight is exactly 1. The weights are those at the start of the batch's training: with
one optimizer step a batch they are exact, with several OpenRLHF's clip covers the later steps.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from megatron_gmc.estimators import GMC, AnyEstimator
from megatron_gmc.integrations.folding import check_estimator, fold, log_ratio_sums
from megatron_gmc.integrations.hosts import check_signature, check_version, refuse

TRIED = ("0.11",)

check_version("openrlhf", TRIED)
check_signature("openrlhf", RemoteExperienceMaker.compute_advantages_and_returns, ("experiences",))


class GroupWeights(RemoteExperienceMaker):  # type: ignore[misc, unused-ignore]
    """`RemoteExperienceMaker` with weights; raises ValueError for settings that do not fit."""

    estimator: ClassVar[AnyEstimator] = GMC()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse("OpenRLHF", wrong_settings(self.args))

    def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
        """OpenRLHF's advantages, weighted; the metrics go into each experience's info."""
        if any(experience.rollout_log_probs is None for experience in experiences):
            raise ValueError("rollout_log_probs: the rollout brought no behaviour log-probs")
        size = self.args.rollout.n_samples_per_prompt
        experiences = super().compute_advantages_and_returns(experiences)
        index = [place for experience in experiences for place in experience.index]
        log_ratio_N = torch.cat(
            [
                log_ratio_sums(e.action_log_probs, e.rollout_log_probs, e.action_mask)
                for e in experiences
            ]
        )
        weight_N, metrics = fold(
            torch.ones_like(log_ratio_N),
            log_ratio_N,
            # A sample's place in the batch of prompts × samples, which OpenRLHF keeps with it.
            torch.tensor(index, device=log_ratio_N.device) // size,
            self.estimator,
            group_size=size,
        )
        parts = weight_N.split([len(experience.index) for experience in experiences])
        for experience, weight in zip(experiences, parts, strict=True):
            experience.advantages = experience.advantages * weight[:, None].to(
                experience.advantages
            )
            experience.rollout_log_probs = experience.action_log_probs.clone()
            for name, value in metrics.items():
                experience.info[name] = torch.full((len(weight),), value)
        return experiences


def install(estimator: AnyEstimator | None = None) -> None:
    """Make `GroupWeights` what this process's trainer makes its experiences with.

    The trainer is a Ray actor: name this function, or one of yours that calls it with another
    method, as Ray's `worker_process_setup_hook`.
    """
    check_estimator(estimator or GMC())
    GroupWeights.estimator = estimator or GMC()
    ppo_trainer.RemoteExperienceMaker = GroupWeights


def wrong_settings(args: Any) -> dict[str, str]:
    """Setting → what it must be and why, for each that is otherwise."""
    advantage, rollout = args.algo.advantage, args.rollout
    needed = "OpenRLHF asks for behaviour log-probs only then; its weight is made 1"
    found = {
        "algo.advantage.is_correction_level": (advantage.is_correction_level, "token", needed),
        "algo.advantage.is_correction_gating": (advantage.is_correction_gating, "ratio", needed),
        "actor.policy_loss_type": (
            args.actor.policy_loss_type, "ppo", "the other is not linear in the advantage"
        ),
        "algo.kl.init_coef": (
            args.algo.kl.init_coef, 0, "a KL term on lagging samples is biased without the weights"
        ),
        "rollout.top_p": (rollout.top_p, 1.0, "the ratios' mean would not be 1"),
    }  # fmt: skip
    wrong = {
        name: f"must be {right}, got {value}: {why}"
        for name, (value, right, why) in found.items()
        if value != right
    }
    low, high = advantage.is_correction_threshold
    if not low <= 1 <= high:
        wrong["algo.advantage.is_correction_threshold"] = "must hold 1, or the weight 1 is dropped"
    if rollout.n_samples_per_prompt < 2:
        wrong["rollout.n_samples_per_prompt"] = "must be at least 2: a group is what is weighted"
    return wrong
