"""OpenRLHF's own advantage and loss with weights, and its Ray workers' start.

In an environment with openrlhf 0.11.2 (flash-attn, deepspeed and vllm may be missing: nothing here
calls them): `make host-test HOST=openrlhf`.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed import ROOT
from tests.estimators.oracle import Member, trajectory_weights
from tests.stand_ins import stand_in_for

pytestmark = pytest.mark.host("openrlhf")

G = 4
INDEX = [[5, 0], [3, 6, 1], [7, 2, 4]]
"""Places of the samples in three micro-batches, in any order; groups 0–3 and 4–7."""


@pytest.fixture(autouse=True, scope="module")
def importable() -> None:
    stand_in_for("flash_attn", "deepspeed", "vllm")


def arguments(**changes: object) -> Any:
    values: dict[str, object] = {
        "algo.advantage.estimator": "rloo",
        "algo.advantage.gamma": 1.0,
        "algo.advantage.is_correction_level": "token",
        "algo.advantage.is_correction_mode": "mask",
        "algo.advantage.is_correction_gating": "ratio",
        "algo.advantage.is_correction_threshold": [0.5, 5.0],
        "algo.kl.init_coef": 0,
        "actor.policy_loss_type": "ppo",
        "rollout.top_p": 1.0,
        "rollout.n_samples_per_prompt": G,
        "reward.clip_range": None,
        "reward.overlong_buffer_len": None,
        "reward.stop_properly_penalty_coef": None,
    }
    tree = SimpleNamespace()
    for name, value in (values | {k.replace("__", "."): v for k, v in changes.items()}).items():
        *path, last = name.split(".")
        section = tree
        for part in path:
            section.__dict__.setdefault(part, SimpleNamespace())
            section = getattr(section, part)
        setattr(section, last, value)
    return tree


def experiences() -> list[Any]:
    from openrlhf.trainer.ppo_utils.experience import Experience

    generator = torch.Generator().manual_seed(0)
    made = []
    for index in INDEX:
        shape = (len(index), 6)
        behaviour = -3 * torch.rand(shape, generator=generator)
        mask = torch.rand(shape, generator=generator) < 0.8
        mask[:, 0] = True
        made.append(
            Experience(
                index=index,
                action_log_probs=behaviour + 0.5 * torch.randn(shape, generator=generator),
                rollout_log_probs=behaviour,
                action_mask=mask,
                rewards=torch.rand(len(index), generator=generator).round(),
                kl=torch.zeros(shape),
            )
        )
    return made


def maker(maker_class: Any, **changes: object) -> Any:
    strategy = SimpleNamespace(args=arguments(**changes))
    control = SimpleNamespace(value=0.0)
    return maker_class(None, None, None, None, control, strategy, None)


def test_openrlhfs_advantages_times_the_oracles_weights() -> None:
    """G1: groups by the place that OpenRLHF keeps, whatever the micro-batches."""
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    from megatron_gmc.integrations.openrlhf import GroupWeights

    stock = maker(RemoteExperienceMaker).compute_advantages_and_returns(experiences())
    found = maker(GroupWeights).compute_advantages_and_returns(experiences())
    log_ratio = [
        float((row.action_log_probs - row.rollout_log_probs).double()[i][row.action_mask[i]].sum())
        for row in experiences()
        for i in range(len(row.index))
    ]
    groups = [place // G for place in itertools.chain(*INDEX)]
    weights = trajectory_weights("gmc", {"epsilon": 0.2}, [Member(v) for v in log_ratio], groups)
    before = torch.cat([row.advantages for row in stock])
    after = torch.cat([row.advantages for row in found])
    assert bool((before != 0).any())
    expected = before * torch.tensor([float(w) for w in weights])[:, None]
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-8)
    assert set(found[0].info["ratio/capped_share"].tolist()) <= {0.0, 0.5, 1.0}


def test_openrlhfs_own_correction_is_one() -> None:
    """Its loss with the correction on is its loss with the correction off."""
    from openrlhf.models.loss import PolicyLoss

    from megatron_gmc.integrations.openrlhf import GroupWeights

    (row, *_) = maker(GroupWeights).compute_advantages_and_returns(experiences())
    losses = []
    for level in ("off", "token"):
        loss = PolicyLoss(is_correction_level=level, is_correction_threshold=[0.5, 5.0])
        current = row.action_log_probs.clone().requires_grad_()
        value = loss(
            current, row.action_log_probs, row.advantages, row.action_mask,
            rollout_log_probs=row.rollout_log_probs,
        )[0]  # fmt: skip
        losses.append((value, *torch.autograd.grad(value, current)))
    assert bool((losses[0][1] != 0).any())
    for off, on in zip(*losses, strict=True):
        torch.testing.assert_close(on, off, rtol=0, atol=0)


def test_the_trainer_makes_its_experiences_with_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from openrlhf.trainer import ppo_trainer

    from megatron_gmc.estimators import GRPO, TICClip
    from megatron_gmc.integrations import openrlhf

    monkeypatch.setattr(ppo_trainer, "RemoteExperienceMaker", ppo_trainer.RemoteExperienceMaker)
    monkeypatch.setattr(openrlhf.GroupWeights, "estimator", openrlhf.GMC())
    with pytest.raises(ValueError, match="grpo is not one weight a trajectory"):
        openrlhf.install(GRPO())
    openrlhf.install(TICClip())
    openrlhf.install(TICClip())
    assert ppo_trainer.RemoteExperienceMaker is openrlhf.GroupWeights
    assert openrlhf.GroupWeights.estimator == TICClip()


def start_of_a_worker() -> None:
    """What Ray calls in each of its processes: the stand-ins are this test's, the rest a user's."""
    stand_in_for("flash_attn", "deepspeed", "vllm")
    from megatron_gmc.integrations.openrlhf import install

    install()


def test_rays_workers_start_with_it() -> None:
    """The trainer is an actor in a process that Ray starts."""
    import ray

    hook = f"{__name__}.{start_of_a_worker.__name__}"
    environment = {"PYTHONPATH": str(ROOT)}
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": hook, "env_vars": environment},
    )
    try:

        @ray.remote
        def what_the_trainer_uses() -> str:
            from openrlhf.trainer import ppo_trainer

            return f"{ppo_trainer.RemoteExperienceMaker.__module__}"

        found = ray.get(what_the_trainer_uses.remote(), timeout=100)
    finally:
        ray.shutdown()
    assert found == "megatron_gmc.integrations.openrlhf"


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("algo__advantage__is_correction_level", "off", "is_correction_level: must be token"),
        ("algo__advantage__is_correction_gating", "tv", "is_correction_gating: must be ratio"),
        ("algo__advantage__is_correction_threshold", [2.0, 5.0], "threshold: must hold 1"),
        ("actor__policy_loss_type", "gspo", "policy_loss_type: must be ppo"),
        ("algo__kl__init_coef", 0.01, "init_coef: must be 0"),
        ("rollout__top_p", 0.9, r"top_p: must be 1\.0, got 0\.9"),
    ],
)
def test_what_does_not_go_with_the_weights_is_refused(
    setting: str, value: object, message: str
) -> None:
    """T9, before training starts."""
    from megatron_gmc.integrations.openrlhf import GroupWeights

    with pytest.raises(ValueError, match=message):
        maker(GroupWeights, **{setting: value})


def test_a_rollout_without_log_probs_is_refused() -> None:
    """T6."""
    from megatron_gmc.integrations.openrlhf import GroupWeights

    rows = experiences()
    rows[1].rollout_log_probs = None
    with pytest.raises(ValueError, match="rollout_log_probs: the rollout brought no"):
        maker(GroupWeights).compute_advantages_and_returns(rows)
