"""Deficit and retained mass when log-ratios are normal: the numbers behind `megatron-gmc theory`.

A sum of many small token differences is about normal, and E ρ = 1 fixes its mean: with σ = sd(ℓ),
log ρ ~ N(−σ²/2, σ²). Then v = Var ρ = e^{σ²} − 1. Notation as in `bounds`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gmc.theory.lattice import Estimate, Lattice, mass_deficit

LARGEST_GROUP = 4096
"""The largest G, far beyond what anyone samples for one prompt; its lattice has 262,144 cells."""

LARGEST_EPSILON = 20.0
"""Where the search for an epsilon ends: a cap of 21 holds little back."""

_CELLS_PER_MEMBER = 64
_FEWEST_CELLS = 2**14


def ratio_variance(sd: float) -> float:
    """v = χ²(π‖behaviour) = e^{σ²} − 1; inf where that leaves float64. [PROVEN]"""
    _check(sd, 1.0)
    return math.expm1(sd * sd) if sd * sd < 700 else math.inf


def tic_clip_deficit(sd: float, epsilon: float) -> float:
    """E(ρ − c)₊ = Φ(d₁) − cΦ(d₁ − σ), d₁ = (σ²/2 − log c)/σ: a Black–Scholes call. [PROVEN]"""
    _check(sd, epsilon)
    d1 = _d1(sd, epsilon)
    return _normal_cdf(d1) - (1 + epsilon) * _normal_cdf(d1 - sd)


def tic_mask_deficit(sd: float, epsilon: float) -> float:
    """E[ρ·1{ρ > c}] = Φ(d₁): under the tilt by ρ, ℓ ~ N(σ²/2, σ²). [PROVEN]"""
    _check(sd, epsilon)
    return _normal_cdf(_d1(sd, epsilon))


def gmc_deficit(sd: float, group_size: int, epsilon: float) -> Estimate:
    """E(M − c)₊ of a group by convolution on a lattice, with its error.

    The value is never below the truth by more than rounding (see `lattice`), at any σ or G.
    G = 1 is the closed form.
    """
    _check(sd, epsilon)
    if not 1 <= group_size <= LARGEST_GROUP:
        raise ValueError(f"group_size must be between 1 and {LARGEST_GROUP}, got {group_size}")
    alone = tic_clip_deficit(sd, epsilon)
    if group_size == 1:
        return Estimate(alone, 0.0)
    cells = max(_FEWEST_CELLS, 2 ** math.ceil(math.log2(_CELLS_PER_MEMBER * group_size)))
    step = group_size * (1 + epsilon) / cells
    lattice = Lattice(step, _lattice_masses(sd, step, cells))
    found = mass_deficit(lattice, group_size, epsilon)
    # Never above a group of one; a cap of a million makes the lattice coarser than that.
    return Estimate(min(found.value, alone), found.error)


@dataclass(frozen=True)
class Retained:
    """Share of the expected gradient weight that survives, 1 − deficit, of each method."""

    gmc: float
    tic_clip: float
    tic_mask: float


def retained_mass(sd: float, group_size: int, epsilon: float) -> Retained:
    """1 − deficit of each method; GMC's and TIC-clip's are E min(M, c) and E min(ρ, c). [PROVEN]"""
    return Retained(
        gmc=1 - gmc_deficit(sd, group_size, epsilon).value,
        tic_clip=1 - tic_clip_deficit(sd, epsilon),
        tic_mask=1 - tic_mask_deficit(sd, epsilon),
    )


def group_size_for(deficit: float, sd: float, epsilon: float) -> int | None:
    """The least G whose GMC deficit is at most `deficit`; None above `LARGEST_GROUP`.

    Bisection is right because E(M − c)₊ never rises with G: M_{G+1} is the conditional mean of
    M_G given M_{G+1}, then Jensen. [PROVEN]
    """
    _check_deficit(deficit)
    enough = 1
    while gmc_deficit(sd, enough, epsilon).value > deficit:
        enough *= 2
        if enough > LARGEST_GROUP:
            return None
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if gmc_deficit(sd, middle, epsilon).value > deficit:
            too_few = middle
        else:
            enough = middle
    return enough


def epsilon_for(deficit: float, sd: float, group_size: int) -> float | None:
    """The least ε, to 1e-3, whose GMC deficit is at most `deficit`; None above `LARGEST_EPSILON`.

    The deficit falls as ε rises; the second-moment bound (1 + ε)²B² rises. [PROVEN]
    """
    _check_deficit(deficit)
    low, high = 0.0, LARGEST_EPSILON
    if gmc_deficit(sd, group_size, high).value > deficit:
        return None
    while high - low > 1e-3:
        middle = (low + high) / 2
        if gmc_deficit(sd, group_size, middle).value > deficit:
            low = middle
        else:
            high = middle
    return high


def sd_for(deficit: float, group_size: int, epsilon: float) -> float:
    """The largest sd(ℓ) at which GMC's deficit is at most `deficit`, to 1e-4.

    The deficit rises with σ, because ρ at a smaller σ is a conditional mean of ρ at a larger.
    [PROVEN]
    """
    _check_deficit(deficit)
    low, high = 0.0, 1.0
    while gmc_deficit(high, group_size, epsilon).value <= deficit:
        low, high = high, 2 * high
    while high - low > 1e-4:
        middle = (low + high) / 2
        if gmc_deficit(middle, group_size, epsilon).value <= deficit:
            low = middle
        else:
            high = middle
    return low


def _lattice_masses(sd: float, step: float, cells: int) -> Tensor:
    """Masses at 0, h, …, (cells − 1)·h of ρ with each cell's mass split so as to keep its mean."""
    edge = torch.arange(1, cells + 1, dtype=torch.float64) * step
    d1 = (sd * sd / 2 - edge.log()) / sd
    # Differences of upper tails keep their relative accuracy far out, where the edges are large;
    # differences of cdfs near 1 leave 1e-16 in each of many cells.
    one = torch.ones(1, dtype=torch.float64)
    probability = -torch.cat([one, _upper_tail(sd - d1)]).diff()
    tilted = -torch.cat([one, _upper_tail(-d1)]).diff()
    start = torch.arange(cells, dtype=torch.float64) * step
    to_right = ((tilted - start * probability) / step).clamp(min=0.0)
    masses = (probability - to_right).clamp(min=0.0)
    masses[1:] += to_right[:-1]
    return masses


def _d1(sd: float, epsilon: float) -> float:
    return (sd * sd / 2 - math.log1p(epsilon)) / sd


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _upper_tail(x: Tensor) -> Tensor:
    # torch.special.ndtr loses all relative accuracy below −6; erfc keeps it.
    return 0.5 * torch.erfc(x / math.sqrt(2))


def _check_deficit(deficit: float) -> None:
    if not 0 < deficit < 1:
        raise ValueError(f"deficit must be between 0 and 1, got {deficit:g}")


def _check(sd: float, epsilon: float) -> None:
    if not 0 < sd < math.inf:
        raise ValueError(f"sd must be finite and above 0, got {sd:g}")
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be finite and above 0, got {epsilon:g}")
