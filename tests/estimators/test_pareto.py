"""The tail's shape on samples whose shape is known, and where it is not defined."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_gmc.estimators import pareto_shape
from megatron_gmc.estimators.pareto import fit_shape
from tests.estimators.records import double


def pareto_sample(shape: float, scale: float, count: int, seed: int = 0) -> Tensor:
    """By the inverse of the generalised Pareto law's distribution function."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    return scale * ((1 - uniform) ** -shape - 1) / shape


@pytest.mark.parametrize("shape", [-0.5, 0.2, 0.5, 0.7, 1.5])
@pytest.mark.parametrize("scale", [1e-3, 40.0])
def test_the_fit_finds_the_shape(shape: float, scale: float) -> None:
    """Within five of the maximum likelihood's standard errors, (1 + k)/√n; −0.5 has a smaller."""
    count = 4000
    fitted = fit_shape(pareto_sample(shape, scale, count).sort().values)
    assert fitted == pytest.approx(shape, abs=5 * (1 + shape) / math.sqrt(count))


def test_the_fit_is_near_the_likelihoods_maximum() -> None:
    """A grid over shape and scale: the fit's profile likelihood is close to the best there is."""
    excess = pareto_sample(0.4, 2.0, 300).sort().values

    def log_likelihood(shape: float, scale: float) -> float:
        return float(
            -len(excess) * math.log(scale)
            - (1 + 1 / shape) * torch.log1p(shape * excess / scale).sum()
        )

    best = max(
        (log_likelihood(shape / 100, scale / 20), shape / 100)
        for shape in range(5, 120)
        for scale in range(20, 80)
    )
    assert fit_shape(excess) == pytest.approx(best[1], abs=0.05)


@pytest.mark.parametrize("shape", [0.3, 0.9])
def test_the_tail_of_ratios(shape: float) -> None:
    """Ratios that are Pareto all over, with the prior's pull towards 1/2 taken off."""
    ratio = 1 + pareto_sample(shape, shape, 20_000)
    tail = math.ceil(3 * math.sqrt(20_000))
    found = pareto_shape(ratio.log())
    assert found is not None
    unpulled = (found * (tail + 10) - 5) / tail
    assert unpulled == pytest.approx(shape, abs=5 * (1 + shape) / math.sqrt(tail))


def test_a_common_factor_does_not_matter() -> None:
    log_ratio_N = 2 * torch.randn(500, generator=torch.Generator().manual_seed(1)).double()
    assert pareto_shape(log_ratio_N + 5000) == pytest.approx(pareto_shape(log_ratio_N), rel=1e-9)


def test_where_there_is_no_tail() -> None:
    normal_N = torch.randn(200, generator=torch.Generator().manual_seed(1)).double()
    assert pareto_shape(normal_N[:24]) is None
    assert pareto_shape(normal_N[:25]) is not None
    assert pareto_shape(torch.zeros(200).double()) is None
    for bad in (math.nan, math.inf, -math.inf):
        assert pareto_shape(torch.cat([normal_N, double([bad])])) is None
