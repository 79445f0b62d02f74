"""The factor for engine against learner, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_gmc.estimators import MaskedMismatch, TruncatedMismatch
from tests.estimators.records import double

INF, NAN = math.inf, math.nan


def test_each_form_is_its_formula() -> None:
    ratios = [0.0, 0.3, 0.5, 1.0, 1.9, 2.1, 5.0, 6.0]
    log_K = double(ratios).log()
    truncated = TruncatedMismatch(cap=2.0).factors(log_K).tolist()
    assert truncated == pytest.approx([0, 0.3, 0.5, 1, 1.9, 2, 2, 2])
    masked = MaskedMismatch(lower=0.4, upper=5.5).factors(log_K).tolist()
    assert masked == pytest.approx([0, 0, 0.5, 1, 1.9, 2.1, 5, 0])


@pytest.mark.parametrize("mismatch", [TruncatedMismatch(), MaskedMismatch()])
def test_factors_at_the_ends_of_the_line(mismatch: TruncatedMismatch | MaskedMismatch) -> None:
    """Float64, detached, finite for any log-ratio but NaN, which stays."""
    log_K = torch.tensor([-INF, -1000.0, 1000.0, NAN], requires_grad=True)
    factors = mismatch.factors(log_K)
    assert factors.dtype == torch.float64
    assert not factors.requires_grad
    assert factors[:3].isfinite().all()
    assert factors[:2].tolist() == [0, 0]
    assert factors[3].isnan()


@pytest.mark.parametrize(
    ("form", "parameters", "message"),
    [
        (TruncatedMismatch, {"cap": 0.0}, "cap must be above 0"),
        (TruncatedMismatch, {"cap": 0.9}, "cap must be at least 1, got 0.9"),
        (TruncatedMismatch, {"cap": INF}, "cap must be finite"),
        (MaskedMismatch, {"lower": 1.1}, "lower must be at most 1, got 1.1"),
        (MaskedMismatch, {"upper": 0.5}, "upper must be at least 1, got 0.5"),
    ],
)
def test_a_factor_that_would_change_what_agrees(
    form: type[TruncatedMismatch] | type[MaskedMismatch],
    parameters: dict[str, float],
    message: str,
) -> None:
    """Where engine and learner agree, k = 1, every form is 1."""
    assert form().factors(double([0.0])).tolist() == [1]
    with pytest.raises(ValueError, match=message):
        form(**parameters)
