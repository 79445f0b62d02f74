"""slime's hooks: group ids on the driver, weights on the learner, token weights nowhere.

    --custom-reward-post-process-path megatron_gmc.integrations.slime.group_rewards
    --rollout-data-postprocess-path megatron_gmc.integrations.slime.weigh
    --get-mismatch-metrics
    --custom-tis-function-path megatron_gmc.integrations.slime.no_token_weights

`weigh` is GMC with ε = 0.2; for another method put `weigh = weigh_with(TICClip(0.1))` into a module
of your own and name that. slime hands the learner no group ids, but `sample.index`, which serves
nothing else there; `group_rewards` packs the group into it. `--get-mismatch-metrics` makes slime
recompute the log-probs that the ratios need, and `no_token_weights` takes the place of the token
weights that it would then apply. With the patch in patches/slime the learner has the group ids, and
the first option is free for a function of your own.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gmc.estimators import GMC, AnyEstimator
from megatron_gmc.integrations.folding import check_estimator, fold, log_ratio_sums
from megatron_gmc.integrations.gathering import gather_over
from megatron_gmc.integrations.hosts import check_signature, refuse

PASS_THROUGH = "megatron_gmc.integrations.slime.no_token_weights"

_FIELD = 12
"""Bits of a sample's place in its group, and of the group's size, in `sample.index`."""

RolloutData = dict[str, Any]
Hook = Callable[[Namespace, int, RolloutData], None]


def group_rewards(args: Namespace, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """slime's reward post-processing, by the id of the group and not by position.

    Returns raw and normalised rewards as slime's own does: less the group's mean, over the sample
    standard deviation + 1e-6 with `grpo_std_normalization`; unchanged without
    `rewards_normalization`. Each sample's `index` becomes what `weigh` reads.

    Raises ValueError for a setting that does not go with the weights, for a sample without
    `group_index`, and for a group of 4096 or more.
    """
    refuse("slime", _wrong_settings(args))
    groups = [sample.group_index for sample in samples]
    if None in groups:
        raise ValueError(
            f"group_index: sample {groups.index(None)} has none; the data source must set it, "
            "equal for the samples of one prompt"
        )
    sizes = Counter(groups)
    place: Counter[int] = Counter()
    for sample, group in zip(samples, groups, strict=True):
        sample.index = packed_index(group, sizes[group], place[group])
        place[group] += 1
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    return raw, _normalised(args, raw, groups) if args.rewards_normalization else raw


def no_token_weights(
    args: Namespace, *, pg_loss: Tensor, loss_masks: list[Tensor], **_: object
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """In the place of a token-level importance correction: the loss as it is."""
    return pg_loss, loss_masks, {}


def weigh_with(estimator: AnyEstimator) -> Hook:
    """A `rollout-data-postprocess` hook that weights advantages; metrics go to slime's logger.

    The weights are those at the start of the rollout's training: with one optimizer step a rollout
    they are exact, with several slime's clip covers the steps after the first.
    """
    check_estimator(estimator)

    def weigh(args: Namespace, rollout_id: int, rollout_data: RolloutData) -> None:
        from megatron.core import mpu

        if not mpu.is_pipeline_last_stage():
            return
        refuse("slime", _wrong_settings(args) | _missing(rollout_data))
        log_ratio = _log_ratios(rollout_data)
        if mpu.get_context_parallel_world_size() > 1:
            dist.all_reduce(log_ratio, group=mpu.get_context_parallel_group())
        gather = gather_over(mpu.get_data_parallel_group(with_context_parallel=False))
        ones = torch.ones(len(log_ratio), device=log_ratio.device)
        if "group_indices" in rollout_data:
            group = torch.tensor(rollout_data["group_indices"], device=log_ratio.device)
            size = args.n_samples_per_prompt
        else:
            index = torch.tensor(rollout_data["sample_indices"], device=log_ratio.device)
            _check_whole(gather(index)[0])
            group, size = index >> (2 * _FIELD), None
        weights, metrics = fold(ones, log_ratio, group, estimator, gather, group_size=size)
        rollout_data["advantages"] = [
            advantage * weight
            for advantage, weight in zip(rollout_data["advantages"], weights, strict=True)
        ]
        # slime logs what it finds here as rollout/NAME, the mean over ranks.
        rollout_data.update({name: torch.tensor(value) for name, value in metrics.items()})

    return weigh


weigh = weigh_with(GMC())


def packed_index(group: int, size: int, place: int) -> int:
    """Group, its size and a sample's place in it as one integer; raises ValueError."""
    if size >= 1 << _FIELD or group < 0:
        raise ValueError(
            f"group_index: group {group} of {size} samples; groups are numbered from 0 and have "
            f"fewer than {1 << _FIELD} samples"
        )
    return ((group << _FIELD) + size << _FIELD) + place


def _normalised(args: Namespace, raw: list[float], groups: Sequence[int]) -> list[float]:
    members: dict[int, list[float]] = defaultdict(list)
    for reward, group in zip(raw, groups, strict=True):
        members[group].append(reward)
    mean = {group: statistics.fmean(rewards) for group, rewards in members.items()}
    scale = dict.fromkeys(members, 1.0)
    if args.grpo_std_normalization:
        scale = {
            # slime divides by n − 1; equal rewards are 0 whatever they are divided by.
            group: statistics.stdev(rewards) + 1e-6 if len(rewards) > 1 else 1.0
            for group, rewards in members.items()
        }
    return [(r - mean[group]) / scale[group] for r, group in zip(raw, groups, strict=True)]


def _log_ratios(rollout_data: RolloutData) -> Tensor:
    """This context-parallel rank's part of each trajectory's log-ratio, float64 [N]."""
    parts = []
    for current, behaviour, mask, total, response in zip(
        rollout_data["log_probs"],
        rollout_data["rollout_log_probs"],
        rollout_data["loss_masks"],
        rollout_data["total_lengths"],
        rollout_data["response_lengths"],
        strict=True,
    ):
        if not bool(mask.any()):
            raise ValueError(
                "loss_masks: a sample has no loss token (remove_sample?), so its ratio is not "
                "known and its group's mass would be wrong; give it reward 0 and keep its tokens"
            )
        own = _own_part(mask, total, response).to(current.device)
        parts.append(log_ratio_sums(current[None], behaviour.to(current.device)[None], own[None]))
    return torch.cat(parts)


def _own_part(mask: Tensor, total: int, response: int) -> Tensor:
    """What this context-parallel rank holds of a response, as slime cuts it."""
    from megatron.core import mpu

    if mpu.get_context_parallel_world_size() == 1:
        return mask
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    check_signature(
        "slime", slice_log_prob_with_cp, ("log_prob", "total_length", "response_length")
    )
    part: Tensor = slice_log_prob_with_cp(mask, total, response)
    return part


def _check_whole(index_N: Tensor) -> None:
    """Every group has as many members as it had on the driver."""
    group_N = index_N >> (2 * _FIELD)
    size_N = index_N >> _FIELD & (1 << _FIELD) - 1
    _, inverse_N, found_P = group_N.unique(return_inverse=True, return_counts=True)
    wrong_N = (found_P[inverse_N] != size_N) | (size_N == 0)
    if bool(wrong_N.any()):
        raise ValueError(
            f"sample_indices: groups {group_N[wrong_N].unique().tolist()[:8]} are not whole, or "
            f"their ids were not set by {group_rewards.__module__}.group_rewards "
            "(--custom-reward-post-process-path)"
        )


def _missing(rollout_data: RolloutData) -> dict[str, str]:
    wrong = {}
    if None in rollout_data.get("group_indices", []):
        wrong["group_index"] = "a sample has none; the data source must set it"
    if not rollout_data.get("log_probs"):
        wrong["get_mismatch_metrics"] = "must be set, so that slime recomputes the log-probs"
    if not rollout_data.get("rollout_log_probs"):
        wrong["rollout_log_probs"] = "the rollout brought no behaviour log-probs"
    ids = rollout_data.get("rollout_ids", [])
    if len(set(ids)) != len(ids):
        wrong["rollout_id"] = "one rollout gave several samples; a trajectory must be one sample"
    return wrong


def _wrong_settings(args: Namespace) -> dict[str, str]:
    settings: Mapping[str, Any] = vars(args)
    right = {
        "use_tis": (False, "it is slime's own correction"),
        "use_opsm": (False, "it is a second correction"),
        "use_rollout_logprobs": (False, "the weights already hold the ratio"),
        "keep_old_actor": (False, "the log-probs must be the current policy's"),
        "get_mismatch_metrics": (True, "it makes slime recompute the log-probs"),
        "custom_tis_function_path": (PASS_THROUGH, "get_mismatch_metrics applies what it names"),
        "advantage_estimator": ("grpo", "the loss must be linear in the advantage"),
        "rollout_top_p": (1.0, "the ratios' mean would not be 1"),
        "rollout_top_k": (-1, "the ratios' mean would not be 1"),
        "kl_coef": (0, "a KL term on lagging samples is biased without the weights"),
        # slime's recipes turn use_kl_loss on with coefficient 0, to watch the KL.
        "kl_loss_coef": (0, "a KL term on lagging samples is biased without the weights"),
    }
    return {
        name: f"must be {value}, got {settings.get(name)}: {why}"
        for name, (value, why) in right.items()
        if settings.get(name) != value
    }
