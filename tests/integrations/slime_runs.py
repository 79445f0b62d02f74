"""slime's driver and learner around its hooks, for `python -m tests.integrations.slime_runs`.

`driver` runs slime's own conversion of samples and its split over data-parallel ranks (Ray, SGLang
and HTTP stand-ins around them); `learner` runs the ranks' part, on gloo groups of megatron-core.
"""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_gmc.integrations import slime as hooks
from tests.stand_ins import stand_in_for

ARGUMENTS = {
    "use_tis": False,
    "use_opsm": False,
    "use_rollout_logprobs": False,
    "keep_old_actor": False,
    "get_mismatch_metrics": True,
    "custom_tis_function_path": hooks.PASS_THROUGH,
    "advantage_estimator": "grpo",
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "kl_coef": 0,
    "kl_loss_coef": 0.0,
    "rewards_normalization": True,
    "grpo_std_normalization": False,
    "n_samples_per_prompt": 4,
}
"""What the adapter reads of slime's arguments, as it wants them."""


@dataclass(frozen=True)
class Trajectory:
    """A sample of the case, with what the learner's forward would give."""

    group: int
    reward: float
    prompt: int
    behaviour: list[float]
    current: list[float]
    mask: list[int]


def case(groups_of_four: bool = False) -> list[Trajectory]:
    """Groups of 4, 4 and 1 trajectories (ids 5, 2, 9) in any order, lengths 3 to 11.

    groups_of_four: without the group of one.
    """
    whole = _case()
    return [t for t in whole if t.group != 9] if groups_of_four else whole


def _case() -> list[Trajectory]:
    rng = random.Random(0)
    groups = [5, 2, 5, 2, 9, 2, 5, 5, 2]
    rewards = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    trajectories = []
    for group, reward in zip(groups, rewards, strict=True):
        length = rng.randint(3, 11)
        behaviour = [-rng.expovariate(0.5) for _ in range(length)]
        current = [b + rng.gauss(0.1, 0.4) for b in behaviour]
        mask = [1, *(int(rng.random() < 0.8) for _ in range(length - 1))]
        prompt = rng.randint(2, 6)
        trajectories.append(Trajectory(group, reward, prompt, behaviour, current, mask))
    return trajectories


def driver(folder: str, rewards: str = "hook") -> None:
    """slime's own driver; writes one shard for each of two data-parallel ranks.

    rewards: "hook" for the adapter's post-processing, "own" for somebody else's.
    """
    stand_in_for("ray", "sglang", "requests", "urllib3", "wandb", "pybase64")
    from slime.ray import rollout
    from slime.utils.types import Sample

    rollout.ray.put = lambda shard, **_: shard
    manager = rollout.RolloutManager.__new__(rollout.RolloutManager)
    manager.args = Namespace(
        **ARGUMENTS,
        reward_key=None,
        global_batch_size=9,
        micro_batch_size=1,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=20,
        balance_by_flops=False,
        balance_data=False,
    )
    manager.custom_reward_post_process_func = (
        hooks.group_rewards if rewards == "hook" else own_rewards
    )
    manager.custom_convert_samples_to_train_data_func = None
    manager.train_parallel_config = {
        "dp_size": 2,
        "cp_size": 1,
        "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }
    samples = [
        Sample(
            group_index=t.group,
            index=i,
            rollout_id=i,
            tokens=list(range(t.prompt + len(t.mask))),
            response_length=len(t.mask),
            reward=t.reward,
            loss_mask=t.mask,
            rollout_log_probs=t.behaviour,
        )
        for i, t in enumerate(case(rewards == "own"))
    ]
    manager.args.global_batch_size = len(samples)
    data = manager._convert_samples_to_train_data(samples)
    shards = [box.inner for box in manager._split_train_data_by_dp(data)]
    for shard in shards:
        # What slime's learner does when it fetches its shard.
        shard["total_lengths"] = [shard["total_lengths"][j] for j in shard["partition"]]
    torch.save(shards, Path(folder) / "shards.pt")


def own_rewards(args: Namespace, samples: list[Any]) -> tuple[list[float], list[float]]:
    """A reward post-processing that knows nothing of the adapter."""
    raw = [sample.reward for sample in samples]
    return raw, [reward + 0.5 for reward in raw]


def learner(folder: str, context: str) -> None:
    """Weighs this rank's shard; with context parallelism by slime's own functions."""
    # Not above: a test process that imports megatron before our learner could not use the learner.
    from megatron.core import mpu

    dist.init_process_group("gloo")
    mpu.initialize_model_parallel(context_parallel_size=int(context))
    data = mpu.get_data_parallel_rank()
    shard = torch.load(Path(folder) / "shards.pt")[data]
    whole = case("group_indices" in shard)
    trajectories = [whole[j] for j in shard["partition"]]
    shard["log_probs"] = [torch.tensor(t.current) for t in trajectories]
    args = Namespace(**ARGUMENTS)
    if int(context) == 1:
        shard["advantages"] = [
            torch.full((length,), reward)
            for length, reward in zip(shard["response_lengths"], shard["rewards"], strict=True)
        ]
    else:
        _slimes_advantages(args, shard)
    before = [advantage.clone() for advantage in shard["advantages"]]
    hooks.weigh(args, 0, shard)
    result = {
        "partition": shard["partition"],
        "before": before,
        "after": shard["advantages"],
        "metrics": {k: float(v) for k, v in shard.items() if k.startswith("ratio/")},
        "error": _error_of_half_a_group(args, shard),
    }
    torch.save(result, Path(folder) / f"rank{dist.get_rank()}.pt")
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


def _slimes_advantages(args: Namespace, shard: dict[str, Any]) -> None:
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns

    for key in ("log_probs", "rollout_log_probs"):
        shard[key] = [
            slice_log_prob_with_cp(*parts)
            for parts in zip(
                shard[key], shard["total_lengths"], shard["response_lengths"], strict=True
            )
        ]
    args.custom_advantage_function_path = None
    args.use_opd = False
    args.normalize_advantages = False
    compute_advantages_and_returns(args, shard)


def _error_of_half_a_group(args: Namespace, shard: dict[str, Any]) -> str:
    """What `weigh` says when every data-parallel rank has lost its first trajectory."""
    lists = {k: v[1:] for k, v in shard.items() if isinstance(v, list) and len(v) > 1}
    try:
        hooks.weigh(args, 0, lists)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
