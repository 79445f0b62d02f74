"""Theorem R: how lag slows SGD down, term by term, and the step size that balances the terms.

Assumed: J is L-smooth; |advantage|·‖score‖ ≤ B; the batch of step k is fresh given the past, its
trajectories independent from policies at most τ steps old, none dropped for its length; and *local
overlap*, χ²(π_θ‖π_θ') ≤ C²‖θ − θ'‖² as far as τ steps reach. SGD, θ ← θ + ηĝ; Adam is not covered.
Whether this is the paper's own theorem is not known: [RECON].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Method = Literal["gmc", "tic_clip", "tic_mask"]


@dataclass(frozen=True)
class Problem:
    """The constants of Theorem R."""

    smoothness: float
    """L: ‖∇J(θ) − ∇J(θ')‖ ≤ L‖θ − θ'‖."""
    gradient_bound: float
    """B: the largest |advantage|·‖score‖ of a trajectory."""
    overlap: float
    """C: χ²(π_θ‖π_θ') ≤ C²‖θ − θ'‖²."""
    gap: float
    """Δ = J* − J(θ_0)."""
    epsilon: float
    group_size: int
    lag: int
    """τ, in optimizer steps."""
    steps: int
    """N."""

    @property
    def cap(self) -> float:
        """c = 1 + ε."""
        return 1 + self.epsilon


@dataclass(frozen=True)
class Terms:
    """The three terms whose sum bounds the mean of E‖∇J(θ_k)‖² over the run."""

    start: float
    """2Δ/(ηN): what is left of the way from the start."""
    second_moment: float
    """Lηc²B²: the price of ‖ĝ‖ ≤ cB, the same for every weight with mean at most c."""
    bias: float
    """The mean of ‖b_k‖²: the only place where the lag enters, as (ητ)⁴."""

    @property
    def total(self) -> float:
        return self.start + self.second_moment + self.bias


def bias_coefficient(problem: Problem, method: Method) -> float:
    """κ with ‖b_k‖² ≤ κη⁴. [PROVEN] under the assumptions; the rate in ε and G is [ABS].

    ‖θ_k − θ_{k−τ}‖ ≤ ητcB surely, so v ≤ C²η²τ²c²B²; with the deficits' bounds
    gmc B²v²/(16G²ε²), tic_clip the same at G = 1, tic_mask B²c²v²/ε⁴. So ε⁻⁴ becomes ε⁻² only
    against the mask: the detached clip has ε⁻² as well, and lacks G⁻² alone.
    """
    reach = problem.overlap * problem.lag * problem.cap * problem.gradient_bound
    common = problem.gradient_bound**2 * reach**4
    if method == "tic_mask":
        return common * problem.cap**2 / problem.epsilon**4
    members = problem.group_size if method == "gmc" else 1
    return common / (16 * members**2 * problem.epsilon**2)


def convergence_bound(problem: Problem, method: Method, step_size: float) -> Terms:
    """Theorem R: (1/N)Σ E‖∇J(θ_k)‖² ≤ 2Δ/(ηN) + Lηc²B² + κη⁴. [PROVEN] under the assumptions.

    ⟨∇J, ∇J + b⟩ ≥ ½‖∇J‖² − ½‖b‖² in E J(θ_{k+1}) ≥ J + η⟨∇J, ∇J + b⟩ − ½Lη²c²B²; sum over k.
    """
    return Terms(
        start=2 * problem.gap / (step_size * problem.steps),
        second_moment=problem.smoothness * step_size * (problem.cap * problem.gradient_bound) ** 2,
        bias=bias_coefficient(problem, method) * step_size**4,
    )


def delay_step_size(problem: Problem, method: Method) -> float:
    """η = (Δ/(2κN))^(1/5), which minimises 2Δ/(ηN) + κη⁴; inf at lag 0. [PROVEN]"""
    coefficient = bias_coefficient(problem, method)
    if coefficient == 0:
        return math.inf
    return float((problem.gap / (2 * coefficient * problem.steps)) ** 0.2)


def tuned_step_size(problem: Problem, method: Method) -> float:
    """The smaller of `delay_step_size` and √(2Δ/(LNc²B²)), which is best without lag. [PROVEN]

    It gives O(N^(−1/2)) + O(N^(−4/5)) with the lag in the second alone.
    """
    noise = problem.smoothness * problem.steps * (problem.cap * problem.gradient_bound) ** 2
    return min(delay_step_size(problem, method), math.sqrt(2 * problem.gap / noise))


def tuned_delay_term(problem: Problem, method: Method) -> float:
    """(5/4)(2Δ/N)^(4/5)(4κ)^(1/5), the least 2Δ/(ηN) + κη⁴ over η. [PROVEN]

    gmc: N^(−4/5) τ^(4/5) G^(−2/5), and ε^(−2/5) for small ε (c is taken as fixed); tic_clip has no
    G; tic_mask has ε^(−4/5). That GMC's falls as G^(−2/5) is [ABS].
    """
    left = (2 * problem.gap / problem.steps) ** 0.8
    return float(1.25 * left * (4 * bias_coefficient(problem, method)) ** 0.2)
