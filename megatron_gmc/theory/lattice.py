"""E(M − c)₊ of a group by exact convolution of a lattice law: no sampling.

E(M − c)₊ = E(c − M)₊ + E M − c, and (c − M)₊ sees the law of the sum on [0, Gc] alone, however
heavy the tail: ratios are not negative, so sums beyond Gc never come back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A number and a bound of its error."""

    value: float
    error: float


@dataclass(frozen=True, eq=False)
class Lattice:
    """A law of ratios with mean 1 on 0, h, 2h, …, cut off where a single ratio exceeds Gc."""

    step: float
    """h."""
    masses: Tensor
    """float64 [cells], an even number: probability at j·h."""


def lattice_of_atoms(ratio: Tensor, probability: Tensor, step: float, cells: int) -> Lattice:
    """The discrete law `probability` (float64 [A]) at `ratio` (float64 [A], mean 1) on a lattice.

    Each atom is split between its two neighbours so as to keep its mean.
    """
    position = ratio.double() / step
    left = position.floor()
    to_right = probability * (position - left)
    masses = torch.zeros(cells + 1, dtype=torch.float64)
    for index, mass in ((left, probability - to_right), (left + 1, to_right)):
        kept = index < cells
        masses.scatter_add_(0, index[kept].long(), mass[kept])
    return Lattice(step, masses[:cells])


def mass_deficit(law: Lattice, group_size: int, epsilon: float) -> Estimate:
    """E(M − c)₊ for a group of `group_size` independent ratios of the law.

    Moving mass to lattice points at equal mean raises the mean of any convex function [PROVEN], so
    the value is an upper bound, and a lattice twice as coarse gives a larger one. The gap between
    the two is the error; halving h divides it by about four, so the true error is about a third.
    Rounding, below 1e-11, is added to it. `law` must have cells · h = Gc.
    """
    value = _deficit(law, group_size, epsilon)
    coarser = _deficit(_coarser(law), group_size, epsilon)
    return Estimate(max(value, 0.0), abs(coarser - value) + 1e-11)


def _deficit(law: Lattice, group_size: int, epsilon: float) -> float:
    total = _convolution_power(law.masses, group_size)
    mass = torch.arange(len(total), dtype=torch.float64) * (law.step / group_size)
    return float((total * (1 + epsilon - mass)).sum()) - epsilon


def _coarser(law: Lattice) -> Lattice:
    even, odd = law.masses[0::2], law.masses[1::2]
    masses = even + odd / 2
    masses[1:] += odd[:-1] / 2
    return Lattice(2 * law.step, masses)


def _convolution_power(masses: Tensor, power: int) -> Tensor:
    """Law of the sum of `power` independent draws, kept where the lattice reaches."""
    result: Tensor | None = None
    square = masses
    while True:
        if power % 2:
            result = square if result is None else _convolve(result, square)
        power //= 2
        if power == 0:
            assert result is not None, "power is at least 1"
            return result
        square = _convolve(square, square)


def _convolve(first: Tensor, second: Tensor) -> Tensor:
    cells = len(first)
    spectrum = torch.fft.rfft(first, 2 * cells) * torch.fft.rfft(second, 2 * cells)
    # Rounding may leave −1e-18 where there is no mass; setting that to 0 would add up to a bias.
    total: Tensor = torch.fft.irfft(spectrum, 2 * cells)
    return total[:cells]
