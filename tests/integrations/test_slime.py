"""slime's hooks: on recorded shapes always, and around slime's own functions where it is at hand.

`MEGATRON_GMC_SLIME=/path/to/slime pytest tests/integrations/test_slime.py` takes a checkout.
"""

from __future__ import annotations

import os
import shutil
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_gmc.estimators import GRPO
from megatron_gmc.integrations import slime as hooks
from tests.distributed import run_ranks
from tests.estimators.oracle import Member, trajectory_weights
from tests.integrations.slime_runs import ARGUMENTS, case
from tools.patches import change, fitting, read_sets

SOURCE = os.environ.get("MEGATRON_GMC_SLIME")
needs_source = pytest.mark.skipif(
    SOURCE is None, reason="MEGATRON_GMC_SLIME does not name a checkout of slime"
)
WORKERS = "tests.integrations.slime_runs"


class Sample:
    """What the hooks read of slime's `Sample`."""

    def __init__(self, group_index: int | None, reward: float) -> None:
        self.group_index, self.index, self.reward = group_index, 0, reward

    def get_reward_value(self, args: Namespace) -> float:
        return self.reward


def arguments(**changes: object) -> Namespace:
    return Namespace(**(ARGUMENTS | changes))


def recorded_shards() -> list[dict[str, Any]]:
    """What slime's driver made of the case for two ranks, in slime's shapes and types."""
    whole = case()
    sizes = {5: 4, 2: 4, 9: 1}
    place = dict.fromkeys(sizes, 0)
    index = []
    for trajectory in whole:
        index.append(
            hooks.packed_index(trajectory.group, sizes[trajectory.group], place[trajectory.group])
        )
        place[trajectory.group] += 1
    shards = []
    for partition in ([0, 2, 4, 6, 8], [1, 3, 5, 7]):
        rows = [whole[j] for j in partition]
        shards.append(
            {
                "partition": partition,
                "rewards": [row.reward - 0.5 for row in rows],
                "total_lengths": [row.prompt + len(row.mask) for row in rows],
                "response_lengths": [len(row.mask) for row in rows],
                "loss_masks": [torch.tensor(row.mask, dtype=torch.int) for row in rows],
                "sample_indices": [index[j] for j in partition],
                "rollout_ids": partition,
                "rollout_log_probs": [torch.tensor(row.behaviour) for row in rows],
            }
        )
    return shards


def check_ranks(
    folder: Path, ranks: int, error: str = "sample_indices: groups [2, 5] are not whole"
) -> None:
    """Weights against the oracle, metrics alike on all ranks, a broken group refused by name."""
    whole = case("every group must have" in error)
    members = [
        Member(
            sum(c - b for c, b, used in zip(t.current, t.behaviour, t.mask, strict=True) if used)
        )
        for t in whole
    ]
    weights = trajectory_weights("gmc", {"epsilon": 0.2}, members, [t.group for t in whole])
    results = [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]
    seen: set[int] = set()
    for result in results:
        for j, before, after in zip(
            *(result[k] for k in ("partition", "before", "after")), strict=True
        ):
            torch.testing.assert_close(after, before * float(weights[j]), rtol=1e-6, atol=1e-30)
            seen.add(j)
        assert result["metrics"] == results[0]["metrics"]
        assert "ratio/retained_mass" in result["metrics"]
        assert error in result["error"]
    assert seen == set(range(len(whole)))


def test_weights_on_recorded_shapes(tmp_path: Path) -> None:
    """G1: groups of 4, 4 and 1 by id over two data-parallel ranks."""
    torch.save(recorded_shards(), tmp_path / "shards.pt")
    run_ranks(WORKERS, "learner", 2, str(tmp_path), "1")
    check_ranks(tmp_path, 2)


@needs_source
def test_around_slimes_own_functions(tmp_path: Path) -> None:
    """Its conversion, its split over ranks, its advantages; data and context parallel 2 × 2."""
    assert SOURCE is not None
    run_ranks(WORKERS, "driver", 1, str(tmp_path), path=(SOURCE,))
    shards = torch.load(tmp_path / "shards.pt")
    for shard in shards:
        for j, reward in zip(shard["partition"], shard["rewards"], strict=True):
            group = [t.reward for t in case() if t.group == case()[j].group]
            assert reward == pytest.approx(case()[j].reward - statistics.fmean(group))
    run_ranks(WORKERS, "learner", 4, str(tmp_path), "2", path=(SOURCE,))
    check_ranks(tmp_path, 4)


@needs_source
def test_the_patch_leaves_the_reward_hook_to_others(tmp_path: Path) -> None:
    """patches/slime: group ids reach the learner beside a reward post-processing of one's own."""
    assert SOURCE is not None
    copy = tmp_path / "source"
    shutil.copytree(Path(SOURCE, "slime"), copy / "slime")
    chosen = fitting(read_sets(), copy, "slime")
    with pytest.raises(KeyError, match="group_indices"):
        run_ranks(WORKERS, "driver", 1, str(tmp_path), "own", path=(str(copy),))
        torch.load(tmp_path / "shards.pt")[0]["group_indices"]
    assert change(chosen, copy, revert=False)
    run_ranks(WORKERS, "driver", 1, str(tmp_path), "own", path=(str(copy),))
    run_ranks(WORKERS, "learner", 2, str(tmp_path), "1", path=(str(copy),))
    check_ranks(tmp_path, 2, "every group must have 4 trajectories over all ranks")


def test_rewards_are_normalised_by_id() -> None:
    """G1: interleaved groups of 3, 2 and 1; a group of equal rewards is exactly 0."""
    groups = [3, 7, 3, 1, 7, 3]
    rewards = [1.0, 0.1, 0.0, 0.4, 0.1, 0.5]
    samples = [Sample(g, r) for g, r in zip(groups, rewards, strict=True)]
    raw, normalised = hooks.group_rewards(arguments(), samples)
    assert raw == rewards
    assert normalised == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0]
    _, scaled = hooks.group_rewards(arguments(grpo_std_normalization=True), samples)
    assert scaled == pytest.approx([x / (0.5 + 1e-6) for x in normalised])
    assert hooks.group_rewards(arguments(rewards_normalization=False), samples)[1] == rewards
    assert [sample.index >> 24 for sample in samples] == groups
    assert len({sample.index for sample in samples}) == 6


def test_a_sample_without_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="group_index: sample 1 has none"):
        hooks.group_rewards(arguments(), [Sample(1, 0.0), Sample(None, 0.0)])
    with pytest.raises(ValueError, match="group 1 of 4096 samples"):
        hooks.packed_index(1, 4096, 0)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("use_tis", True),
        ("get_mismatch_metrics", False),
        ("custom_tis_function_path", "my.tis"),
        ("advantage_estimator", "gspo"),
        ("rollout_top_p", 0.9),
        ("kl_loss_coef", 0.001),
    ],
)
def test_what_does_not_go_with_the_weights_is_refused(setting: str, value: object) -> None:
    """T9, and slime's own corrections: on the driver, before a sample is trained on."""
    with pytest.raises(ValueError, match=f"{setting}: must be .*, got {value}"):
        hooks.group_rewards(arguments(**{setting: value}), [Sample(1, 0.0)])
    with pytest.raises(ValueError, match="estimator: grpo is not one weight a trajectory"):
        hooks.weigh_with(GRPO())


def test_the_stand_in_for_token_weights_changes_nothing() -> None:
    loss, masks = torch.randn(5), [torch.ones(5)]
    found = hooks.no_token_weights(
        arguments(), pg_loss=loss, loss_masks=masks, train_log_probs=[], rollout_log_probs=[]
    )
    assert found == (loss, masks, {})


@needs_source
def test_slime_still_has_the_hooks() -> None:
    """The learner's order: advantages, hook, log, training; the driver's: rewards, conversion."""
    assert SOURCE is not None
    actor = Path(SOURCE, "slime/backends/megatron_utils/actor.py").read_text()
    order = [
        actor.index(line)
        for line in (
            "compute_advantages_and_returns(self.args, rollout_data)\n\n            if",
            "self.rollout_data_postprocess(self.args, rollout_id, rollout_data)",
            "train_metric_utils.log_rollout_data(",
        )
    ]
    assert order == sorted(order)
