"""Advantages against exact fractions, and the faults that group baselines have had."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gmc.estimators import AdvantageKind, advantages

BASELINES: list[AdvantageKind] = ["leave_one_out", "group_mean", "group_mean_std"]


def exact(rewards: list[Fraction], kind: str) -> list[float]:
    result = []
    for i, own in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        mean = sum(rewards, Fraction(0)) / len(rewards)
        if kind == "leave_one_out":
            result.append(float(own - sum(others, Fraction(0)) / len(others)))
        elif kind == "group_mean":
            result.append(float(own - mean))
        else:
            variance = sum(((r - mean) ** 2 for r in rewards), Fraction(0)) / len(rewards)
            result.append(float(own - mean) / (math.sqrt(variance) + 1e-6))
    return result


@pytest.mark.parametrize("kind", BASELINES)
@settings(deadline=None, max_examples=100)
@given(
    groups=st.lists(
        st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=6), min_size=1, max_size=5
    ),
    seed=st.integers(0, 2**31),
)
def test_against_fractions_in_any_order(
    kind: AdvantageKind, groups: list[list[float]], seed: int
) -> None:
    """G1: no group sees another's members, whatever the order."""
    flat = [(r, g) for g, members in enumerate(groups) for r in members]
    expected = [a for members in groups for a in exact([Fraction(r) for r in members], kind)]
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed))
    advantage_N = advantages(
        torch.tensor([r for r, _ in flat])[order],
        torch.tensor([g for _, g in flat])[order],
        len(groups),
        kind,
    )
    assert advantage_N.dtype == torch.float32
    wanted_N = torch.tensor(expected, dtype=torch.float64)[order].float()
    torch.testing.assert_close(advantage_N, wanted_N, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("kind", BASELINES)
def test_groups_of_uneven_size(kind: AdvantageKind) -> None:
    """G1: groups of 4, 3 and 4, interleaved; the middle one's rewards are all 1."""
    reward_N = torch.tensor([1.0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1])
    group_N = torch.tensor([0, 1, 0, 2, 1, 2, 0, 2, 2, 0, 1])
    advantage_N = advantages(reward_N, group_N, 3, kind)
    assert advantage_N[group_N == 1].tolist() == [0.0, 0.0, 0.0]
    first = exact([Fraction(r) for r in (1, 0, 0, 1)], kind)
    last = exact([Fraction(r) for r in (0, 0, 0, 1)], kind)
    assert advantage_N[group_N == 0].tolist() == pytest.approx(first, rel=1e-6)
    assert advantage_N[group_N == 2].tolist() == pytest.approx(last, rel=1e-6)


@pytest.mark.parametrize("kind", BASELINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7e-9, 1e8])
@pytest.mark.parametrize("size", [3, 7, 8])
def test_equal_rewards_give_exactly_zero(
    kind: AdvantageKind, dtype: torch.dtype, reward: float, size: int
) -> None:
    """G3: eight rewards of 0.1, and other numbers that no sum keeps."""
    reward_N = torch.full((size,), reward, dtype=dtype)
    assert advantages(reward_N, torch.zeros(size).long(), 1, kind).tolist() == [0.0] * size


def test_a_group_of_one_has_no_other_member() -> None:
    """G2: refused with leave_one_out, naming the group; exactly 0 with the other baselines."""
    reward_N, group_N = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1])
    with pytest.raises(ValueError, match=r"leave_one_out.*group 1 has one trajectory"):
        advantages(reward_N, group_N, 2, "leave_one_out")
    assert advantages(reward_N, group_N, 2, "group_mean").tolist() == [0.5, -0.5, 0.0]
    assert advantages(reward_N, group_N, 2, "group_mean_std")[2] == 0
    assert advantages(reward_N, group_N, 2, "none").tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("kind", BASELINES)
def test_one_prompt_twice_is_two_groups(kind: AdvantageKind) -> None:
    """G5: groups are told apart by id; a merged group would have had advantages of ±1/2 or so."""
    reward_N = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert advantages(reward_N, torch.tensor([0, 0, 1, 1]), 2, kind).tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", BASELINES)
def test_a_nan_reward_stays_in_its_group(kind: AdvantageKind) -> None:
    """G4, the estimators' part: such a trajectory is refused before; if not, it is seen."""
    reward_N = torch.tensor([math.nan, 1.0, 1.0, 0.0])
    advantage_N = advantages(reward_N, torch.tensor([0, 0, 1, 1]), 2, kind)
    assert bool(advantage_N[:2].isnan().all())
    assert bool(advantage_N[2:].isfinite().all())


def test_whitening_takes_one_scale_for_the_batch() -> None:
    """Deviations (1/2, −1/2, 0, 0, 3, −3): the root of their mean square is √(37/12)."""
    reward_N = torch.tensor([1.0, 0.0, 5.0, 5.0, 6.0, 0.0])
    advantage_N = advantages(reward_N, torch.tensor([0, 0, 1, 1, 2, 2]), 3, "whitened")
    scale = math.sqrt((0.25 * 2 + 9 * 2) / 6)
    expected = [0.5 / scale, -0.5 / scale, 0, 0, 3 / scale, -3 / scale]
    assert advantage_N.tolist() == pytest.approx(expected, rel=1e-5)
    assert (
        advantages(torch.ones(4), torch.tensor([0, 0, 1, 1]), 2, "whitened").tolist() == [0.0] * 4
    )


def test_a_spread_out_group_reaches_the_bound_of_the_population_form() -> None:
    """One right answer in G has √(G−1) after division by the population standard deviation."""
    reward_N = torch.tensor([1.0] + [0.0] * 15)
    advantage_N = advantages(reward_N, torch.zeros(16).long(), 1, "group_mean_std")
    assert float(advantage_N[0]) == pytest.approx(math.sqrt(15), rel=1e-5)
