"""SkyRL's own advantage step with weights, on synthetic batches.

In an environment with skyrl 0.3.0 and what its trainer imports:
`pytest tests/integrations --host skyrl`.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.estimators.oracle import Member, trajectory_weights

pytestmark = pytest.mark.host("skyrl")

GROUPS = ["a", "b", "a", "b", "b", "a", "a", "b"]


@pytest.fixture(autouse=True, scope="module")
def importable() -> None:
    """SkyRL 0.3.0 declares Python 3.11 and pydantic refuses one of its classes there."""
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict


def config(**changes: object) -> Any:
    from skyrl.train.config import SkyRLTrainConfig

    cfg = SkyRLTrainConfig()
    cfg.trainer.algorithm.use_kl_loss = False
    cfg.trainer.algorithm.grpo_norm_by_std = False
    cfg.generator.sampling_params.logprobs = 1
    for name, value in changes.items():
        *path, last = name.split("__")
        section: Any = cfg
        for part in path:
            section = getattr(section, part)
        assert hasattr(section, last), name
        setattr(section, last, value)
    return cfg


def batch(step_wise: bool) -> Any:
    """Eight rows and two of padding; step-wise, rows 2 and 3 … are turns of one trajectory."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    generator = torch.Generator().manual_seed(0)
    rows, length = 10, 6
    behaviour = -torch.rand(rows, length, generator=generator) * 3
    mask = (torch.rand(rows, length, generator=generator) < 0.8).long()
    mask[:, 0] = 1
    rewards = torch.zeros(rows, length)
    rewards[:, -1] = torch.rand(rows, generator=generator).round()
    data = TrainingInputBatch(
        {
            "response_mask": torch.ones(rows, length, dtype=torch.long),
            "loss_mask": mask,
            "rewards": rewards,
            "values": None,
            "action_log_probs": behaviour + 0.5 * torch.randn(rows, length, generator=generator),
            "rollout_logprobs": behaviour,
        }
    )
    uids = ["a", "a", "b", "b", "a", "b", "a", "b"] if step_wise else GROUPS
    data.metadata = {
        "uids": [*uids, "pad", "pad"],
        "pad_size": 2,
        "avg_response_length": 5.0,
        # Trajectories of rows 0–1, 2–3, 4, 5, 6, 7 and one for each row of padding.
        "is_last_step": [False, True, False, True, *[True] * 6],
    }
    return data


def advantages(trainer_class: Any, step_wise: bool, estimator: object) -> Any:
    trainer = trainer_class.__new__(trainer_class)
    trainer.cfg = config(generator__step_wise_trajectories=step_wise)
    trainer._estimator, trainer.all_metrics = estimator, {}
    data = trainer.compute_advantages_and_returns(batch(step_wise))
    return data["advantages"], trainer.all_metrics


@pytest.mark.parametrize("step_wise", [False, True])
def test_skyrls_advantages_times_the_oracles_weights(step_wise: bool) -> None:
    """G1: groups by uid; turns of one trajectory share the weight of their summed log-ratio."""
    from skyrl.train.trainer import RayPPOTrainer

    from megatron_gmc.estimators import GMC
    from megatron_gmc.integrations.skyrl import GroupWeights

    stock, _ = advantages(RayPPOTrainer, step_wise, None)
    found, metrics = advantages(GroupWeights, step_wise, GMC(epsilon=0.2))
    data = batch(step_wise)
    number = [0, 0, 1, 1, 2, 3, 4, 5] if step_wise else list(range(8))
    difference = (data["action_log_probs"] - data["rollout_logprobs"]).double()
    sums = [float(difference[row][data["loss_mask"][row].bool()].sum()) for row in range(8)]
    log_ratio = [
        math.fsum(s for s, n in zip(sums, number, strict=True) if n == t)
        for t in range(max(number) + 1)
    ]
    groups = [ord(data.metadata["uids"][number.index(t)]) for t in range(max(number) + 1)]
    weights = trajectory_weights("gmc", {"epsilon": 0.2}, [Member(v) for v in log_ratio], groups)
    assert bool((stock[:8] != 0).any())
    for row in range(8):
        expected = stock[row] * float(weights[number[row]])
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(found[8:], stock[8:], rtol=0, atol=0)
    assert metrics["ratio/log_ratio_mean"] == pytest.approx(sum(log_ratio) / len(log_ratio))


def test_a_batch_without_the_policys_log_probs_is_refused() -> None:
    """SkyRL skips that forward for losses that do not read them."""
    from megatron_gmc.estimators import GMC
    from megatron_gmc.integrations.skyrl import GroupWeights

    trainer = GroupWeights.__new__(GroupWeights)
    trainer.cfg, trainer._estimator, trainer.all_metrics = config(), GMC(), {}
    data = batch(False)
    data["action_log_probs"] = None
    with pytest.raises(ValueError, match="action_log_probs: SkyRL's batch has none"):
        trainer.compute_advantages_and_returns(data)


def test_the_entry_class_makes_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl.train.entrypoints.main_base import BasePPOExp

    from megatron_gmc.estimators import TICClip
    from megatron_gmc.integrations import skyrl

    made: list[Any] = []
    monkeypatch.setattr(skyrl.RayPPOTrainer, "__init__", lambda self, *a, **k: made.append((a, k)))
    experiment = skyrl.with_weights(BasePPOExp, TICClip())
    cfg, others = config(), [SimpleNamespace() for _ in range(7)]
    trainer = experiment.get_trainer(SimpleNamespace(), cfg, *others)
    assert made == [((cfg, *others), {})]
    assert trainer._estimator == TICClip()


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("trainer__algorithm__off_policy_correction__tis_ratio_type", "token", "tis_ratio_type: "),
        ("trainer__algorithm__policy_loss_type", "cispo", "policy_loss_type: must be regular"),
        ("trainer__algorithm__use_kl_loss", True, "use_kl_loss: must be False"),
        ("generator__sampling_params__top_p", 0.9, r"top_p: must be 1\.0, got 0\.9"),
        ("generator__sampling_params__logprobs", None, "logprobs: must be set"),
    ],
)
def test_what_does_not_go_with_the_weights_is_refused(
    setting: str, value: object, message: str
) -> None:
    """T9, and SkyRL's own correction: before anything is built."""
    from megatron_gmc.integrations.skyrl import GroupWeights

    with pytest.raises(ValueError, match=message):
        GroupWeights(config(**{setting: value}))
