"""Micro-batch plans: every invariant against a check that counts, on any batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gmc.estimators import Scope
from megatron_gmc.learner.plan import Passes, Plan, plan_micro_batches


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths and groups of 1 to 30 trajectories, groups in any order."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    groups = [g for g, size in enumerate(sizes) for _ in range(size)][:30]
    lengths = draw(st.lists(st.integers(1, 40), min_size=len(groups), max_size=len(groups)))
    return lengths, draw(st.permutations(groups))


def plan(
    lengths: list[int],
    groups: list[int],
    *,
    data_size: int = 1,
    token_limit: int = 10_000,
    scope: Scope = "group",
    passes: Passes = "auto",
) -> Plan:
    return plan_micro_batches(
        torch.tensor(lengths),
        torch.tensor(groups),
        data_size=data_size,
        token_limit=token_limit,
        scope=scope,
        passes=passes,
    )


def split_groups(cut: Plan, groups: list[int]) -> list[int]:
    """Groups of which some micro-batch holds a part only."""
    size = Counter(groups)
    return [
        group
        for rank in cut.micro_batches
        for indexes in rank
        for group, count in Counter(groups[i] for i in indexes).items()
        if count != size[group]
    ]


@given(
    batch=batches(),
    data_size=st.integers(1, 5),
    spare=st.integers(0, 200),
    scope=st.sampled_from(["trajectory", "group", "batch"]),
    passes=st.sampled_from(["auto", "two_pass"]),
)
def test_what_holds_of_every_plan(
    batch: tuple[list[int], list[int]],
    data_size: int,
    spare: int,
    scope: Scope,
    passes: Passes,
) -> None:
    """S2: ranks get the same number of micro-batches, whatever is in them."""
    lengths, groups = batch
    token_limit = max(lengths) + spare
    cut = plan(
        lengths,
        groups,
        data_size=data_size,
        token_limit=token_limit,
        scope=scope,
        passes=passes,
    )
    assert len(cut.micro_batches) == data_size
    placed = [i for rank in cut.micro_batches for indexes in rank for i in indexes]
    assert sorted(placed) == list(range(len(lengths)))
    assert len({len(rank) for rank in cut.micro_batches}) == 1
    assert len(cut.micro_batches[0]) >= 1
    # Nobody runs a micro-batch that is empty on every rank.
    assert all(any(place) for place in zip(*cut.micro_batches, strict=True))
    assert cut.width == max(lengths)
    assert cut.rows == max(len(indexes) for rank in cut.micro_batches for indexes in rank)
    assert cut.rows * cut.width <= token_limit
    if scope == "group" and not cut.two_pass:
        assert split_groups(cut, groups) == []


@given(batch=batches(), data_size=st.integers(1, 5), spare=st.integers(0, 200))
def test_two_passes_only_where_one_will_not_do(
    batch: tuple[list[int], list[int]], data_size: int, spare: int
) -> None:
    lengths, groups = batch
    token_limit = max(lengths) + spare
    fits = max(Counter(groups).values()) * max(lengths) <= token_limit
    cut = plan(lengths, groups, data_size=data_size, token_limit=token_limit)
    assert cut.two_pass == (not fits)
    alone = plan(lengths, groups, token_limit=token_limit, scope="trajectory", passes="two_pass")
    assert not alone.two_pass
    if fits:
        single = plan(
            lengths, groups, data_size=data_size, token_limit=token_limit, passes="single_pass"
        )
        assert single == cut


@given(batch=batches(), data_size=st.integers(1, 5))
def test_ranks_share_the_work(batch: tuple[list[int], list[int]], data_size: int) -> None:
    """With single trajectories to deal out, no rank has two more than another."""
    lengths, groups = batch
    cut = plan(lengths, groups, data_size=data_size, token_limit=max(lengths))
    counts = [sum(len(indexes) for indexes in rank) for rank in cut.micro_batches]
    assert max(counts) - min(counts) <= 1


def test_groups_of_a_usual_batch_are_dealt_out_evenly() -> None:
    groups = [g for g in range(8) for _ in range(4)]
    cut = plan([10] * 32, groups, data_size=2, token_limit=80)
    assert [[sorted({groups[i] for i in m}) for m in rank] for rank in cut.micro_batches] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]


def test_a_rank_without_a_trajectory() -> None:
    """S2, R7: one group, three ranks."""
    cut = plan([5, 6], [0, 0], data_size=3)
    assert sorted(len(indexes) for rank in cut.micro_batches for indexes in rank) == [0, 0, 2]


def test_the_plan_is_a_function_of_the_batch() -> None:
    lengths, groups = [3, 9, 4, 1, 7, 7], [1, 0, 1, 2, 0, 1]
    assert plan(lengths, groups, data_size=2) == plan(lengths, groups, data_size=2)


@pytest.mark.parametrize("scope", ["trajectory", "group", "batch"])
@pytest.mark.parametrize("passes", ["auto", "single_pass", "two_pass"])
def test_a_trajectory_over_the_limit(passes: Passes, scope: Scope) -> None:
    """S5."""
    with pytest.raises(ValueError) as caught:
        plan([3, 41], [0, 0], token_limit=40, passes=passes, scope=scope)
    assert str(caught.value) == (
        "learner.micro_batch_tokens: 40 is less than the longest trajectory, 41 tokens; raise it "
        "to 41 or more"
    )


def test_a_group_that_does_not_fit_in_one_pass() -> None:
    with pytest.raises(ValueError) as caught:
        plan([10, 20, 5, 20], [0, 1, 1, 1], token_limit=59, passes="single_pass")
    assert str(caught.value) == (
        "learner.passes: single_pass needs whole groups in a micro-batch, but a group of 3 × 20 "
        "tokens is over learner.micro_batch_tokens 59; raise that limit or use two_pass"
    )
    assert not plan([10, 20, 5, 20], [0, 1, 1, 1], token_limit=60, passes="single_pass").two_pass
    # Without a look at the group nothing is in the way.
    plan([10, 20], [0, 0], token_limit=20, passes="single_pass", scope="trajectory")
