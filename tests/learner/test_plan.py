"""Micro-batch plans: every invariant against a check that counts, on any batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gmc.estimators import Scope
from megatron_gmc.learner.pack import Padding
from megatron_gmc.learner.plan import Limits, Passes, Plan, plan_micro_batches


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths and groups of 1 to 30 trajectories, groups in any order."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    groups = [g for g, size in enumerate(sizes) for _ in range(size)][:30]
    lengths = draw(st.lists(st.integers(1, 40), min_size=len(groups), max_size=len(groups)))
    return lengths, draw(st.permutations(groups))


limits = st.builds(
    Limits,
    data_size=st.integers(1, 5),
    padding=st.sampled_from([Padding(1, 1), Padding(4, 4), Padding(1, 3), Padding(4, 8)]),
    count_multiple=st.integers(1, 3),
    attention_cost=st.sampled_from([0.0, 0.1]),
)


def plan(
    lengths: list[int],
    groups: list[int],
    *,
    limits: Limits | None = None,
    token_limit: int = 10_000,
    scope: Scope = "group",
    passes: Passes = "auto",
    take: list[bool] | None = None,
) -> Plan:
    return plan_micro_batches(
        torch.tensor(lengths),
        torch.tensor(groups),
        limits=limits or Limits(),
        token_limit=token_limit,
        scope=scope,
        passes=passes,
        take_N=None if take is None else torch.tensor(take),
    )


def split_groups(cut: Plan, groups: list[int], taken: list[int]) -> list[int]:
    """Groups of which some micro-batch holds a part only."""
    size = Counter(groups[i] for i in taken)
    return [
        group
        for rank in cut.micro_batches
        for indexes in rank
        for group, count in Counter(groups[i] for i in indexes).items()
        if count != size[group]
    ]


def placed(cut: Plan) -> list[list[int]]:
    """The trajectories of each rank."""
    return [[i for indexes in rank for i in indexes] for rank in cut.micro_batches]


@given(
    batch=batches(),
    limits=limits,
    spare=st.integers(0, 200),
    scope=st.sampled_from(["trajectory", "group", "batch"]),
    passes=st.sampled_from(["auto", "two_pass"]),
    seed=st.integers(0, 3),
)
def test_what_holds_of_every_plan(
    batch: tuple[list[int], list[int]],
    limits: Limits,
    spare: int,
    scope: Scope,
    passes: Passes,
    seed: int,
) -> None:
    """S2: ranks get the same number of micro-batches, whatever is in them."""
    lengths, groups = batch
    # Whole groups take part or not, as skip_zero_advantage has it; with seed 0 all do.
    taken = [i for i, group in enumerate(groups) if seed == 0 or (group + seed) % 3]
    token_limit = limits.padding.of_pack([max(lengths)]) + spare
    cut = plan(
        lengths,
        groups,
        limits=limits,
        token_limit=token_limit,
        scope=scope,
        passes=passes,
        take=None if seed == 0 else [i in taken for i in range(len(lengths))],
    )
    assert len(cut.micro_batches) == limits.data_size
    assert sorted(i for rank in placed(cut) for i in rank) == taken
    (count,) = {len(rank) for rank in cut.micro_batches}
    assert count >= 1
    assert count % limits.count_multiple == 0
    # Nobody runs more micro-batches that are empty on every rank than the pipeline needs.
    idle = sum(not any(place) for place in zip(*cut.micro_batches, strict=True))
    assert idle < limits.count_multiple or not taken
    assert cut.padding == limits.padding
    for rank in cut.micro_batches:
        for indexes in rank:
            assert cut.padding.of_pack([lengths[i] for i in indexes]) <= token_limit
    if scope == "group" and not cut.two_pass:
        assert split_groups(cut, groups, taken) == []
    if scope == "batch" and not cut.two_pass:
        assert sum(bool(indexes) for rank in cut.micro_batches for indexes in rank) <= 1


@given(batch=batches(), limits=limits, spare=st.integers(0, 200))
def test_two_passes_only_where_one_will_not_do(
    batch: tuple[list[int], list[int]], limits: Limits, spare: int
) -> None:
    lengths, groups = batch
    token_limit = limits.padding.of_pack([max(lengths)]) + spare
    members = [[n for n, of in zip(lengths, groups, strict=True) if of == g] for g in set(groups)]
    fits = max(limits.padding.of_pack(group) for group in members) <= token_limit
    cut = plan(lengths, groups, limits=limits, token_limit=token_limit)
    assert cut.two_pass == (not fits)
    alone = plan(lengths, groups, token_limit=token_limit, scope="trajectory", passes="two_pass")
    assert not alone.two_pass
    if fits:
        single = plan(lengths, groups, limits=limits, token_limit=token_limit, passes="single_pass")
        assert single == cut


@given(batch=batches(), limits=limits, whole=st.booleans())
def test_ranks_share_the_work(
    batch: tuple[list[int], list[int]], limits: Limits, whole: bool
) -> None:
    """No rank has more than another by more than the largest thing that is dealt out."""
    lengths, groups = batch
    cut = plan(lengths, groups, limits=limits, scope="group" if whole else "trajectory")
    work = [sum(limits.work(lengths[i]) for i in rank) for rank in placed(cut)]
    units = [
        sum(limits.work(n) for n, of in zip(lengths, groups, strict=True) if of == group)
        for group in set(groups)
    ]
    largest = max(units if whole else [limits.work(n) for n in lengths])
    assert max(work) - min(work) <= largest * (1 + 1e-9)


def test_attention_counts_as_work() -> None:
    """One trajectory of 100 is as much as four of 37, not as two of 50."""
    work = Limits(attention_cost=0.1).work
    assert work(100) == pytest.approx(100 + 0.1 * sum(range(1, 101)))
    lengths = [100, *[37] * 8, 100]
    cut = plan(
        lengths,
        list(range(10)),
        limits=Limits(data_size=4, attention_cost=0.1),
        scope="trajectory",
    )
    assert sorted(len(rank) for rank in placed(cut)) == [1, 1, 4, 4]


def test_groups_of_a_usual_batch_are_dealt_out_evenly() -> None:
    groups = [g for g in range(8) for _ in range(4)]
    cut = plan([10] * 32, groups, limits=Limits(data_size=2), token_limit=80)
    assert [[len({groups[i] for i in m}) for m in rank] for rank in cut.micro_batches] == [
        [2, 2],
        [2, 2],
    ]
    assert split_groups(cut, groups, list(range(32))) == []


def test_a_rank_without_a_trajectory() -> None:
    """S2, R7: one group, three ranks."""
    cut = plan([5, 6], [0, 0], limits=Limits(data_size=3))
    assert sorted(len(indexes) for rank in cut.micro_batches for indexes in rank) == [0, 0, 2]


def test_a_batch_in_which_nothing_takes_part() -> None:
    cut = plan([5, 6], [0, 0], limits=Limits(data_size=2), take=[False, False])
    assert cut.micro_batches == (((),), ((),))


def test_the_plan_is_a_function_of_the_batch() -> None:
    lengths, groups = [3, 9, 4, 1, 7, 7], [1, 0, 1, 2, 0, 1]
    two = Limits(data_size=2)
    assert plan(lengths, groups, limits=two) == plan(lengths, groups, limits=two)


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


def test_a_trajectory_over_the_limit_with_its_padding() -> None:
    with pytest.raises(ValueError) as caught:
        plan([38], [0], limits=Limits(padding=Padding(4, 8)), token_limit=39)
    assert str(caught.value) == (
        "learner.micro_batch_tokens: 39 is less than the longest trajectory, 38 tokens, 40 on "
        "this mesh; raise it to 40 or more"
    )


def test_a_group_that_does_not_fit_in_one_pass() -> None:
    lengths, groups = [10, 20, 5, 20], [0, 1, 1, 1]
    with pytest.raises(ValueError) as caught:
        plan(lengths, groups, token_limit=44, passes="single_pass")
    assert str(caught.value) == (
        "learner.passes: single_pass needs whole groups in a micro-batch, but a group of 3 "
        "trajectories takes 45 tokens, over learner.micro_batch_tokens 44; raise that limit or "
        "use two_pass"
    )
    assert not plan(lengths, groups, token_limit=45, passes="single_pass").two_pass
    # Without a look at the group nothing is in the way.
    plan([10, 20], [0, 0], token_limit=20, passes="single_pass", scope="trajectory")
