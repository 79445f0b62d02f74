"""verl's own advantage step with weights: real trainer method, TransferQueue a dict.

In an environment with verl 0.9.1 and what its trainer imports:
`pytest tests/integrations --host verl`.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.estimators.oracle import Member, trajectory_weights

pytestmark = pytest.mark.host("verl")


def config(**changes: object) -> Any:
    from omegaconf import OmegaConf

    tree = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "gmc_sync"}},
            "algorithm": {
                "adv_estimator": "grpo",
                "gamma": 1.0,
                "lam": 1.0,
                "use_kl_in_reward": False,
                "norm_adv_by_std_in_grpo": False,
                "rollout_correction": None,
            },
            "actor_rollout_ref": {
                "rollout": {"n": 4, "calculate_log_probs": True, "top_p": 1, "top_k": -1},
                "actor": {
                    "policy_loss": {"loss_mode": "vanilla"},
                    "use_kl_loss": False,
                    "loss_agg_mode": "token-mean",
                },
            },
        }
    )
    for name, value in changes.items():
        OmegaConf.update(tree, name.replace("__", "."), value, force_add=True)
    return tree


def rows() -> list[dict[str, Any]]:
    """Ten rows: groups a (4 sessions, one of two outputs), b (4), and a padding row of verl's."""
    rng = random.Random(3)
    keys = ["a_0_0", "b_1_0", "a_1_0", "b_0_0", "a_2_0", "a_2_1", "b_2_0", "a_3_0", "b_3_0"]
    made = []
    for key in [*keys, "pad_0_0"]:
        padding = key.startswith("pad")
        length = 1 if padding else rng.randint(2, 7)
        behaviour = [-rng.expovariate(1.0) for _ in range(length)]
        made.append(
            {
                "key": key,
                "uid": key[0],
                "behaviour": behaviour,
                "current": [b + rng.gauss(0.2, 0.5) for b in behaviour],
                "mask": [0]
                if padding
                else [1, *(int(rng.random() < 0.8) for _ in range(length - 1))],
                "score": 0.0 if padding else float(rng.random() < 0.5),
                "padding": padding,
            }
        )
    return made


class Queue:
    """TransferQueue's two calls on one TensorDict."""

    def __init__(self, made: list[dict[str, Any]]) -> None:
        from tensordict import TensorDict

        def nested(name: str, dtype: torch.dtype) -> torch.Tensor:
            parts = [torch.tensor(row[name], dtype=dtype) for row in made]
            return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

        scores = [[0.0] * (len(r["mask"]) - 1) + [r["score"]] for r in made]
        for row, score in zip(made, scores, strict=True):
            row["scores"] = score
        self.data = TensorDict(
            {
                "response_mask": nested("mask", torch.int64),
                "rm_scores": nested("scores", torch.float32),
                "rollout_log_probs": nested("behaviour", torch.float32),
                "old_log_probs": nested("current", torch.float32),
            },
            batch_size=len(made),
        )
        self.data["uid"] = [row["uid"] for row in made]

    def kv_batch_get(self, keys: Any, partition_id: str, select_fields: list[str]) -> Any:
        return self.data.select(*select_fields, strict=False).copy()

    def kv_batch_put(self, keys: Any, partition_id: str, fields: Any) -> Any:
        self.data.update(fields)
        return self.batch


def advantages(trainer_class: Any, made: list[dict[str, Any]], estimator: object) -> Any:
    """Advantages [rows][tokens] and metrics out of the trainer's own advantage step."""
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import trainer_base

    queue = Queue(made)
    tags = [{"is_padding": row["padding"]} for row in made]
    queue.batch = KVBatchMeta(
        keys=[row["key"] for row in made], tags=tags, partition_id="train", fields=[]
    )
    trainer = trainer_class.__new__(trainer_class)
    trainer.config, trainer._estimator = config(), estimator
    metrics: dict[str, float] = {}
    original = trainer_base.tq
    trainer_base.tq = queue
    try:
        trainer._compute_advantage(queue.batch, metrics)
    finally:
        trainer_base.tq = original
    return [part.tolist() for part in queue.data["advantages"].unbind()], metrics


def test_verls_advantages_times_the_oracles_weights() -> None:
    """G1: groups by uid in any order; the outputs of one session are one trajectory."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from megatron_gmc.estimators import GMC
    from megatron_gmc.integrations.verl import GMCSync

    stock, _ = advantages(PPOTrainerSync, rows(), None)
    found, metrics = advantages(GMCSync, rows(), GMC(epsilon=0.2))
    log_ratio: dict[str, float] = {}
    for row in rows():
        if not row["padding"]:
            triples = zip(row["current"], row["behaviour"], row["mask"], strict=True)
            session = row["key"].rsplit("_", 1)[0]
            log_ratio[session] = log_ratio.get(session, 0.0) + math.fsum(
                (c - b) * m for c, b, m in triples
            )
    members = [Member(value) for value in log_ratio.values()]
    weights = trajectory_weights("gmc", {"epsilon": 0.2}, members, [ord(s[0]) for s in log_ratio])
    weight = {session: float(w) for session, w in zip(log_ratio, weights, strict=True)}
    assert any(value != 0 for row in stock for value in row)
    for row, before, after in zip(rows(), stock, found, strict=True):
        factor = weight.get(row["key"].rsplit("_", 1)[0], 1.0)
        assert after == pytest.approx([factor * a for a in before], rel=1e-5)
    assert metrics["ratio/mass_mean"] == pytest.approx(
        sum(math.exp(value) for value in log_ratio.values()) / 8, rel=1e-5
    )


def test_the_plugin_registers_the_trainers(tmp_path: Path) -> None:
    """As verl finds it: an entry point of an installed distribution."""
    info = tmp_path / "megatron_gmc-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron_gmc\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\ngmc = megatron_gmc.integrations.verl\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import verl\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "print([get_trainer_cls(f'gmc_{m}').mode for m in "
        "('sync', 'colocate_async', 'separate_async')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.endswith("['sync', 'colocate_async', 'separate_async']\n")


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("actor_rollout_ref__rollout__calculate_log_probs", False, "calculate_log_probs: must be"),
        ("actor_rollout_ref__rollout__top_p", 0.9, r"top_p: must be 1, got 0\.9"),
        ("algorithm__rollout_correction", {"rollout_is": "token"}, "rollout_is: must be None"),
        ("algorithm__rollout_correction", {"bypass_mode": True}, "bypass_mode: must be False"),
        ("actor_rollout_ref__actor__policy_loss__loss_mode", "gspo", "loss_mode: must be vanilla"),
        ("trainer__v1__gmc_sync", {"name": "grpo"}, "grpo is not one weight a trajectory"),
        ("trainer__v1__gmc_sync", {"name": "gmc", "epsilom": 1}, "gmc: .*epsilom"),
        ("trainer__v1__gmc_sync", {"name": "gcm"}, "gcm is no estimator"),
    ],
)
def test_what_does_not_go_with_the_weights_is_refused(
    setting: str, value: object, message: str
) -> None:
    """T9, and verl's own correction: before anything is built."""
    from megatron_gmc.integrations.verl import GMCSync

    with pytest.raises(ValueError, match=message):
        GMCSync(config(**{setting: value}))
