"""Weights of labelled rows: turns of one trajectory together, padding apart."""

from __future__ import annotations

import pytest
import torch

from megatron_gmc.estimators import GMC
from megatron_gmc.integrations.rows import row_weights
from tests.estimators.oracle import Member, trajectory_weights
from tests.integrations.inputs import GROUPS, LOG_RATIOS


def test_rows_of_one_trajectory_are_summed_and_padding_takes_no_part() -> None:
    """Every trajectory in two turns, a row of padding in the middle."""
    rows = len(LOG_RATIOS)
    first = torch.linspace(-1, 1, rows, dtype=torch.float64)
    second = torch.tensor(LOG_RATIOS, dtype=torch.float64) - first
    names = [f"t{n}" for n in range(rows)]
    weight_R, metrics = row_weights(
        torch.cat([first, torch.tensor([50.0], dtype=torch.float64), second]),
        [*names, "padding", *names],
        [*GROUPS, GROUPS[0], *GROUPS],
        [*[True] * rows, False, *[True] * rows],
        GMC(epsilon=0.2),
    )
    members = [Member(value) for value in LOG_RATIOS]
    expected = [float(w) for w in trajectory_weights("gmc", {"epsilon": 0.2}, members, GROUPS)]
    assert weight_R.tolist() == pytest.approx([*expected, 1.0, *expected], rel=1e-9)
    assert metrics["ratio/log_ratio_mean"] == pytest.approx(sum(LOG_RATIOS) / rows)


def test_a_trajectory_in_two_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="the rows of one trajectory name different groups"):
        row_weights(torch.zeros(2).double(), ["t", "t"], ["a", "b"], [True, True], GMC())
