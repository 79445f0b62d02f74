"""Reductions over groups: both layouts against loops, and how the layout is told."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gmc.estimators.groups import Groups
from tests.estimators.records import double


@pytest.mark.parametrize(
    ("index", "count", "row"),
    [
        ([0, 0, 1, 1, 2, 2], 3, 2),
        ([0, 1, 2], 3, 1),
        ([0, 0, 0], 1, 3),
        ([0, 1, 0, 1], 2, None),
        ([0, 0, 0, 1], 2, None),
        ([1, 1, 0, 0], 2, None),
        ([0, 1, 0, 0, 1, 1], 2, None),
        ([0, 0, 0, 1, 1], 2, None),
    ],
)
def test_groups_in_rows_are_told_apart(index: list[int], count: int, row: int | None) -> None:
    groups = Groups.of(torch.tensor(index), count)
    assert groups.row == row
    assert groups.sizes().tolist() == [index.count(group) for group in range(count)]
    assert groups.sizes().dtype == torch.float64


@settings(deadline=None, max_examples=100)
@given(
    size=st.integers(1, 4),
    count=st.integers(1, 4),
    seed=st.integers(0, 1000),
    shuffled=st.booleans(),
)
def test_against_loops(size: int, count: int, seed: int, shuffled: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    index_N = torch.arange(count).repeat_interleave(size)
    if shuffled:
        index_N = index_N[torch.randperm(len(index_N), generator=generator)]
    value_N = torch.randn(len(index_N), generator=generator, dtype=torch.float64)
    value_P = torch.randn(count, generator=generator, dtype=torch.float64)
    groups = Groups.of(index_N, count)
    members = [
        [float(v) for v, g in zip(value_N, index_N, strict=True) if g == p] for p in range(count)
    ]
    assert groups.sum(value_N).tolist() == pytest.approx([math.fsum(m) for m in members], abs=1e-14)
    assert groups.max(value_N).tolist() == [max(m) for m in members]
    of_group = [float(value_P[g]) for g in index_N]
    assert groups.spread(value_P).tolist() == of_group
    values = value_N.tolist()
    assert groups.add(value_N, value_P).tolist() == [
        v + p for v, p in zip(values, of_group, strict=True)
    ]
    scaled_N = value_N.clone()
    groups.scale_(scaled_N, value_P)
    assert scaled_N.tolist() == [v * p for v, p in zip(values, of_group, strict=True)]
    shifted_N, shift_P = groups.shifted_exp(value_N)
    assert shift_P.tolist() == [max(m) for m in members]
    assert shifted_N.tolist() == pytest.approx(
        [math.exp(v - max(members[g])) for v, g in zip(values, index_N.tolist(), strict=True)]
    )


def test_a_nan_stays_in_its_group() -> None:
    for index in ([0, 0, 1, 1], [0, 1, 0, 1]):
        values = double([0.0] * 4)
        values[index.index(0)] = math.nan
        groups = Groups.of(torch.tensor(index), 2)
        assert groups.max(values).isnan().tolist() == [True, False]
        assert groups.sum(values).isnan().tolist() == [True, False]
