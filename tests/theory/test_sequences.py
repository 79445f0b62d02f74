"""All sequences of a tabular policy: exact laws, and which log-probs give E ρ = 1 (E14)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from megatron_gmc.theory.sequences import (
    SequenceSpace,
    chi_square,
    group_deficit,
    kept_by_top_p,
    mean_ratio,
    mixed_token_log_probs,
)

SPACE = SequenceSpace()


def table(space: SequenceSpace, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (space.prefixes, space.vocabulary)
    return torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(-1)


def law(space: SequenceSpace, log_probs: Tensor) -> Tensor:
    return space.token_log_probs(log_probs).sum(1)


def test_sequences_and_prefixes_are_all_there() -> None:
    assert SPACE.tokens().shape == (4096, 6)
    assert SPACE.prefixes == 1365
    assert float(law(SPACE, table(SPACE, 0)).exp().sum()) == pytest.approx(1, abs=1e-12)


def test_every_prefix_has_its_own_row() -> None:
    space = SequenceSpace(vocabulary=3, length=4)
    rows: dict[tuple[int, ...], set[int]] = {}
    for sequence, index in zip(space.tokens().tolist(), space.prefix_index().tolist(), strict=True):
        for t, row in enumerate(index):
            rows.setdefault(tuple(sequence[:t]), set()).add(row)
    assert all(len(found) == 1 for found in rows.values())
    assert sorted(row for found in rows.values() for row in found) == list(range(space.prefixes))


def test_tokens_recorded_under_their_own_version_have_mean_ratio_one() -> None:
    """E14: the version may change after any token, as long as it looks at the past alone."""
    old, new, current = (table(SPACE, seed) for seed in (1, 2, 3))

    def after_first_zero(tokens: Tensor) -> Tensor:
        seen = (tokens == 0).long().cumsum(1).clamp(max=1)
        return torch.cat([torch.zeros_like(seen[:, :1]), seen[:, :-1]], 1)

    def on_the_future(tokens: Tensor) -> Tensor:
        return (tokens[:, -1:] == 0).long().expand_as(tokens)

    policy = law(SPACE, current)
    recorded = mixed_token_log_probs(SPACE, [old, new], after_first_zero).sum(1)
    chance = recorded.exp()
    assert float(chance.sum()) == pytest.approx(1, abs=1e-12)
    assert mean_ratio(policy, recorded, chance) == pytest.approx(1, abs=1e-9)
    for wrong in (old, new):
        assert abs(mean_ratio(policy, law(SPACE, wrong), chance) - 1) > 0.01
    # A switch that depends on later tokens is no sampling at all.
    impossible = mixed_token_log_probs(SPACE, [old, new], on_the_future).sum(1)
    assert abs(float(impossible.exp().sum()) - 1) > 1e-4


def test_filters_temperature_and_truncation_break_the_mean_ratio() -> None:
    """E14, T1, T9."""
    behaviour, current = table(SPACE, 4), table(SPACE, 5)
    one, policy = law(SPACE, behaviour), law(SPACE, current)
    assert mean_ratio(policy, one, one.exp()) == pytest.approx(1, abs=1e-9)
    survive = 0.5 ** (SPACE.tokens() == 0).sum(1).double()
    assert abs(mean_ratio(policy, one, one.exp() * survive / (one.exp() @ survive)) - 1) > 0.01
    warm = law(SPACE, (behaviour / 1.3).log_softmax(-1))
    assert abs(mean_ratio(policy, one, warm.exp()) - 1) > 0.01
    kept = kept_by_top_p(behaviour, 0.8)
    nucleus = law(SPACE, torch.where(kept, behaviour, -torch.inf).log_softmax(-1))
    on_support = float(policy.exp()[nucleus.isfinite()].sum())
    assert on_support < 0.99
    assert mean_ratio(policy, nucleus, nucleus.exp()) == pytest.approx(on_support, abs=1e-9)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    probabilities = torch.tensor([[0.1, 0.5, 0.15, 0.25]], dtype=torch.float64)
    assert kept_by_top_p(probabilities.log(), 0.7).tolist() == [[False, True, False, True]]
    assert kept_by_top_p(probabilities.log(), 0.8).tolist() == [[False, True, True, True]]


def test_group_deficit_by_enumeration() -> None:
    space = SequenceSpace(vocabulary=2, length=3)
    behaviour, policy = (law(space, table(space, seed)) for seed in (6, 7))
    chance, ratio = behaviour.exp().tolist(), (policy - behaviour).exp().tolist()
    expected = sum(
        math.prod(chance[i] for i in group) * max(sum(ratio[i] for i in group) / 3 - 1.2, 0)
        for group in itertools.product(range(8), repeat=3)
    )
    assert expected > 0.01
    estimate = group_deficit(policy, behaviour, 3, 0.2)
    # The law has atoms, so the lattice's error is of order h rather than h².
    assert estimate.value == pytest.approx(expected, abs=1e-4)
    assert expected <= estimate.value + 1e-11
    square = sum(c * (r - 1) ** 2 for c, r in zip(chance, ratio, strict=True))
    assert chi_square(policy, behaviour) == pytest.approx(square, rel=1e-12)
