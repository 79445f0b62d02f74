"""ms-swift's own post-processing with weights, on its own samples and batches.

In an environment with ms-swift 4.6.0 and msgspec: `pytest tests/integrations --host swift`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.estimators.oracle import Member, trajectory_weights

pytestmark = pytest.mark.host("swift")

ROWS, LENGTH, G = 8, 6, 4


def logps() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    behaviour = -3 * torch.rand(ROWS, LENGTH, generator=generator)
    current = behaviour + 0.5 * torch.randn(ROWS, LENGTH, generator=generator)
    mask = torch.rand(ROWS, LENGTH, generator=generator) < 0.8
    mask[:, 0] = True
    return current, behaviour, mask


def processed(trainer_class: Any, prompts: list[str], **changes: Any) -> tuple[torch.Tensor, Any]:
    """Advantages [rows, tokens] of two micro-batches, and the trainer's metrics."""
    from swift.rl_core.data import GRPOBatch, GRPOSample

    current, behaviour, mask = logps()
    trainer = trainer_class.__new__(trainer_class)
    fields: dict[str, Any] = {
        "_has_teacher": False,
        "use_teacher_api": False,
        "advantage_reweight": None,
        "sdar_loss_coef": 0.0,
        "teacher_kl_coef": 0.0,
        "kl_in_reward": False,
        "beta": 0.0,
        "model": SimpleNamespace(training=True),
        "num_generations": G,
        "num_generations_eval": G,
        "dynamic_num_samples": False,
        "reward_weights": torch.ones(1),
        "reward_func_names": ["f"],
        "advantage_estimator": "grpo",
        "scale_rewards": "none",
        "_metrics": {"train": defaultdict(list)},
        "_logs": {"advantages": [], "rewards": defaultdict(list)},
        "accelerator": SimpleNamespace(device="cpu", num_processes=1, process_index=0),
        "template": SimpleNamespace(sequence_parallel_size=1),
        "args": SimpleNamespace(steps_per_generation=2),
        "_rewards_per_func": torch.tensor([[1.0], [0], [0], [1], [1], [1], [1], [0]]),
    }
    for name, value in (fields | changes).items():
        object.__setattr__(trainer, name, value)
    samples = [
        GRPOSample(messages=[], prompt_id=p, request_id=str(i)) for i, p in enumerate(prompts)
    ]
    batches = [
        {
            "grpo_batch": GRPOBatch(
                completion_mask=mask[rows],
                truncated_mask=torch.zeros(4),
                seq_lengths=mask[rows].sum(1),
                old_per_token_logps=current[rows],
                rollout_per_token_logps=behaviour[rows],
            )
        }
        for rows in (slice(0, 4), slice(4, 8))
    ]
    trainer._postprocess_batch(samples, batches)
    return torch.cat([batch["grpo_batch"].advantages for batch in batches]), trainer._metrics


def test_swifts_advantages_times_the_oracles_weights() -> None:
    """G1: groups by prompt id, here across both micro-batches and in any order."""
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    from megatron_gmc.integrations.swift import GroupWeights

    prompts = ["p1", "p0", "p0", "p1", "p0", "p1", "p1", "p0"]
    stock, _ = processed(GRPOTrainer, prompts)
    found, metrics = processed(GroupWeights, prompts)
    current, behaviour, mask = logps()
    difference = (current - behaviour).double()
    log_ratio = [float(difference[row][mask[row]].sum()) for row in range(ROWS)]
    members = [Member(value) for value in log_ratio]
    weights = trajectory_weights("gmc", {"epsilon": 0.2}, members, [int(p[1]) for p in prompts])
    expected = stock * torch.tensor([float(w) for w in weights])[:, None]
    assert bool((stock != 0).any())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    assert metrics["train"]["ratio/mass_mean"] == [
        pytest.approx(sum(math.exp(value) for value in log_ratio) / ROWS, rel=1e-6)
    ]


def test_a_sample_without_a_prompt_id_is_refused() -> None:
    from megatron_gmc.integrations.swift import GroupWeights

    with pytest.raises(ValueError, match="prompt_id: a sample has none"):
        processed(GroupWeights, [""] * ROWS)


def test_several_samples_a_rollout_are_refused() -> None:
    """swift's multi-turn rollouts: half of a trajectory has half of its log-ratio."""
    from megatron_gmc.integrations.swift import GroupWeights

    rewards = torch.ones(ROWS, 1)
    with pytest.raises(ValueError, match="a rollout gave several samples"):
        processed(
            GroupWeights,
            ["p0"] * ROWS,
            dynamic_num_samples=True,
            _rewards_per_func=rewards,
            _get_last_indices=lambda ids: torch.arange(len(ids)),
        )


def test_the_plugin_changes_the_trainer_that_swift_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    from swift.trainers.trainer_factory import TrainerFactory

    from megatron_gmc.estimators import GMC, GRPO, TICClip
    from megatron_gmc.integrations import swift

    monkeypatch.setitem(TrainerFactory.TRAINER_MAPPING, "grpo", "swift.rlhf_trainers.GRPOTrainer")
    with pytest.raises(ValueError, match="grpo is not one weight a trajectory"):
        swift.install(GRPO())
    swift.install(TICClip())
    assert TrainerFactory.get_trainer_cls(SimpleNamespace(rlhf_type="grpo")) is swift.GroupWeights
    assert swift.GroupWeights.estimator == TICClip()
    swift.install(GMC())


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("rollout_importance_sampling_mode", "token_mask", "must be None, got token_mask"),
        ("use_vllm", False, "use_vllm: must be True"),
        ("loss_type", "cispo", "loss_type: must be dr_grpo or grpo or dapo, got cispo"),
        ("beta", 0.04, "beta: must be 0"),
        ("top_p", 0.9, r"top_p: must be 1\.0"),
    ],
)
def test_what_does_not_go_with_the_weights_is_refused(
    setting: str, value: object, message: str
) -> None:
    """T9, and swift's own correction: before anything is built."""
    from megatron_gmc.integrations.swift import GroupWeights

    right = {
        "rollout_importance_sampling_mode": None,
        "off_policy_sequence_mask_delta": None,
        "use_vllm": True,
        "loss_type": "grpo",
        "beta": 0.0,
        "advantage_reweight": None,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": None,
        "repetition_penalty": 1.0,
        "overlong_filter": False,
    }
    with pytest.raises(ValueError, match=message):
        GroupWeights(args=SimpleNamespace(**(right | {setting: value})))
