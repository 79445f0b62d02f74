"""How trajectories lie in packs and who holds which tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gmc.learner.pack import Padding, context_rows

lengths = st.lists(st.integers(1, 50), max_size=8)
paddings = st.builds(
    Padding.of,
    tensor=st.integers(1, 4),
    context=st.integers(1, 4),
    sequence_parallel=st.booleans(),
)


@pytest.mark.parametrize(
    ("tensor", "context", "sequence_parallel", "expected"),
    [
        (1, 1, False, Padding(1, 1)),
        (4, 1, False, Padding(1, 1)),
        (4, 1, True, Padding(1, 4)),
        (1, 2, False, Padding(4, 4)),
        (2, 2, True, Padding(4, 4)),
        (4, 2, True, Padding(4, 8)),
        (3, 2, True, Padding(4, 12)),
    ],
)
def test_no_more_padding_than_the_mesh_needs(
    tensor: int, context: int, sequence_parallel: bool, expected: Padding
) -> None:
    padding = Padding.of(tensor=tensor, context=context, sequence_parallel=sequence_parallel)
    assert padding == expected


@given(lengths=lengths, padding=paddings)
def test_what_holds_of_every_pack(lengths: list[int], padding: Padding) -> None:
    padded = padding.padded(lengths)
    assert len(padded) == max(1, len(lengths))
    assert sum(padded) == padding.of_pack(lengths)
    assert sum(padded) > 0
    assert sum(padded) % padding.pack == 0
    assert all(n % padding.trajectory == 0 for n in padded)
    added = [n - length for n, length in zip(padded, lengths, strict=False)]
    assert all(0 <= n < padding.trajectory for n in added[1:])
    assert all(0 <= n < padding.trajectory + padding.pack for n in added[:1])


@given(parts=st.lists(st.integers(0, 6), min_size=1, max_size=6), size=st.integers(1, 4))
def test_context_ranks_share_every_token_and_the_work(parts: list[int], size: int) -> None:
    """Each row once; under a causal mask equal numbers of (query, key) pairs on each rank."""
    padded = [2 * size * part for part in parts]
    position = torch.cat([torch.arange(n) for n in padded])
    held = [context_rows(padded, size, rank) for rank in range(size)]
    assert torch.cat(held).sort().values.tolist() == list(range(sum(padded)))
    assert len({len(rows) for rows in held}) == 1
    assert len({int((position[rows] + 1).sum()) for rows in held}) == 1
