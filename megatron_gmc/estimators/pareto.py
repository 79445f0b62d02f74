"""How heavy the tail of importance ratios is: the shape of a generalised Pareto law."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST_SAMPLE = 25
"""Below it the largest fifth has fewer than five members, too few for a fit."""


def pareto_shape(log_ratio_N: Tensor) -> float | None:
    """k̂ of the largest ratios, as in Pareto-smoothed importance sampling; None where undefined.

    log_ratio_N float64 [N]; ratios count up to a common factor. The min(N/5, 3√N) largest are
    fitted above the next smaller one, and k̂ is drawn to 0.5 with the weight of ten samples
    (Vehtari, Simpson, Gelman, Yao, Gabry, "Pareto smoothed importance sampling", JMLR 2024,
    sections 2 and 3). None for fewer than 25 ratios, for a log-ratio that is not finite, and for
    a tail without spread. Below 0.5 the ratios' variance is finite, above 0.7 not even their mean
    can be estimated in practice.
    """
    count = len(log_ratio_N)
    if count < LEAST_SAMPLE or not bool(log_ratio_N.isfinite().all()):
        return None
    tail = min(count // 5, math.ceil(3 * math.sqrt(count)))
    largest = log_ratio_N.double().topk(tail + 1).values
    ratio_T = (largest - largest[0]).exp()
    excess_T = (ratio_T[:-1] - ratio_T[-1]).flip(0)
    excess_T = excess_T[excess_T > 0]
    if len(excess_T) < LEAST_SAMPLE // 5:
        return None
    shape = fit_shape(excess_T)
    return (len(excess_T) * shape + 10 * 0.5) / (len(excess_T) + 10)


def fit_shape(excess_T: Tensor) -> float:
    """Shape k of the generalised Pareto law that fits `excess_T`, float64 [T], positive, ascending.

    Zhang and Stephens, "A new and efficient estimation method for the generalized Pareto
    distribution", Technometrics 51 (2009): the posterior mean of θ over a grid, under a prior that
    the quartile sets, and then k from θ. (Their k is −k here.)
    """
    size = len(excess_T)
    points = 30 + math.isqrt(size)
    index = torch.arange(1, points + 1, dtype=torch.float64, device=excess_T.device)
    quartile = excess_T[int(size / 4 + 0.5) - 1]
    theta = 1 / excess_T[-1] + (1 - torch.sqrt(points / (index - 0.5))) / (3 * quartile)
    shapes = torch.log1p(-theta[:, None] * excess_T).mean(1)
    log_likelihood = size * (torch.log(-theta / shapes) - shapes - 1)
    mean_theta = (log_likelihood.softmax(0) * theta).sum()
    return float(torch.log1p(-mean_theta * excess_T).mean())
