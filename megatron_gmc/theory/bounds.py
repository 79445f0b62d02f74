"""Bounds on what a cap takes away, for any law of the ratios with mean 1 and a given variance.

ρ ≥ 0 is a trajectory's ratio under the behaviour policy, E ρ = 1, v = Var ρ = χ²(π‖behaviour),
M the mean of ρ over a group of G independent members, c = 1 + ε the cap. The *deficit* of a method
is the expected L1 distance of its weights from the ratios; the bias of its gradient is at most
the deficit times B, the largest |advantage|·‖score‖. For GMC the deficit is E(M − c)₊.

Tags: [PROVEN] the proof is in the docstring; [RECON] our reconstruction of what the paper
(arXiv 2610.01896) must do; [ABS] its abstract says so.
"""

from __future__ import annotations

import math


def scarf_bound(variance: float, group_size: int, epsilon: float) -> float:
    """½(√(v/G + ε²) − ε) ≥ E(M − c)₊, for ratios of either sign. [PROVEN]

    x₊ = ½(x + |x|) with x = M − 1 − ε has mean −ε, and E|x| ≤ √(E x²) = √(v/G + ε²).
    """
    _check(variance, group_size, epsilon)
    return 0.5 * (math.sqrt(variance / group_size + epsilon**2) - epsilon)


def deficit_bound(variance: float, group_size: int, epsilon: float) -> float:
    """The least upper bound of E(M − c)₊ over masses M ≥ 0 of mean 1, variance u = v/G. [PROVEN]

    u ≤ 1 + 2ε: `scarf_bound`, attained by atoms at c ± √(u + ε²), which are not negative then.
    u > 1 + 2ε: 1 − c/(1 + u), attained by atoms at 0 and 1 + u. Proof: with
    q(x) = x − c + c(1 − x/(1 + u))², q ≥ x − c, and q = x(1 − 2c/(1 + u)) + c x²/(1 + u)² ≥ 0 for
    x ≥ 0; E q = 1 − c/(1 + u). So the bound is never above 1, however large the variance.
    """
    _check(variance, group_size, epsilon)
    mass_variance = variance / group_size
    if mass_variance <= 1 + 2 * epsilon:
        return scarf_bound(variance, group_size, epsilon)
    return 1 - (1 + epsilon) / (1 + mass_variance)


def variance_bound(variance: float, group_size: int, epsilon: float) -> float:
    """v/(4Gε) ≥ E(M − c)₊; the constant ¼ is best possible for every G. [PROVEN]

    From `scarf_bound` by √(ε² + u) − ε ≤ u/(2ε). It is approached by ρ = 1 + 2Gε with
    probability p → 0, balanced below 1 otherwise.
    """
    _check(variance, group_size, epsilon)
    return variance / (4 * group_size * epsilon)


def tic_clip_bound(variance: float, epsilon: float) -> float:
    """The least upper bound of TIC-clip's deficit E(ρ − c)₊: `deficit_bound` at G = 1. [PROVEN]

    No group size enters, and its order in ε is ε⁻¹ (squared: ε⁻²), as GMC's.
    """
    return deficit_bound(variance, 1, epsilon)


def tic_mask_bound(variance: float, epsilon: float) -> float:
    """The least upper bound of TIC-mask's deficit E[ρ·1{ρ > c}]: min(1, c·v/(v + ε²)). [PROVEN]

    It is at most 1 = E ρ. For v ≤ ε(2 + ε) take q(x) = k(x − a)², a = 1 − v/ε, k = c/(c − a)²:
    q(c) = c and q'(c) = 2c/(c − a) ≥ 1, so q(x) ≥ x above c, and E q = k(v + v²/ε²) =
    c·v/(v + ε²). Approached by an atom just above c and one at a; from v = ε on, where a would be
    negative, by atoms at 0 and 1 + v. Squared, its order in ε is ε⁻⁴ as long as v ≪ ε².
    """
    _check(variance, 1, epsilon)
    return min(1.0, (1 + epsilon) * variance / (variance + epsilon**2))


def tic_mask_simple_bound(variance: float, epsilon: float) -> float:
    """(1 + ε)v/ε² ≥ E[ρ·1{ρ > c}], the form that Theorem R uses. [PROVEN]

    ρ ≤ (ρ − 1)²·c/ε² for ρ > c, since t/(t − 1)² falls for t > 1.
    """
    _check(variance, 1, epsilon)
    return (1 + epsilon) * variance / epsilon**2


def bernstein_bound(
    variance: float, group_size: int, epsilon: float, largest_ratio: float
) -> float:
    """∫_ε^∞ exp(−Gt²/(2(v + Rt/3))) dt ≥ E(M − c)₊ for ρ ≤ R: exponential in G. [PROVEN]

    Bernstein's inequality for P(M − 1 > t), integrated. Composite Simpson rule in u = log(t/ε),
    until the exponent is beyond 60 (a rest below 1e-24).
    """
    _check(variance, group_size, epsilon)
    if largest_ratio < 1:
        raise ValueError(f"largest_ratio must be at least 1, the mean, got {largest_ratio:g}")

    def exponent(t: float) -> float:
        return group_size * t * t / (2 * (variance + largest_ratio * t / 3))

    end = epsilon
    while exponent(end) < 60:
        end *= 2
    intervals = 2000
    step = math.log(end / epsilon) / intervals
    total = 0.0
    for i in range(intervals + 1):
        t = epsilon * math.exp(i * step)
        factor = 1 if i in (0, intervals) else 2 + 2 * (i % 2)
        total += factor * t * math.exp(-exponent(t))
    return total * step / 3


def member_limit_bound(
    variance: float, group_size: int, epsilon: float, member_limit: float
) -> float:
    """v/(4Gε) + v/(4(b − 1)), a bound for weights min(λρ, b), λ = min(1, c/M). [PROVEN]

    A limit b ≥ c of each member's weight inside the group's cap, beyond the paper; from b = cG on
    it is GMC. The deficit is (M − c)₊ plus the mean of (λρ − b)₊ ≤ (ρ − b)₊, and `variance_bound`
    at G = 1 with ε = b − 1 bounds the second. With b = G^β, 0 < β < 1, both terms and the weights'
    second moment over G (at most b/G) vanish as G grows.
    """
    _check(variance, group_size, epsilon)
    if not 1 + epsilon <= member_limit < math.inf:
        raise ValueError(
            f"member_limit must be finite and at least the cap {1 + epsilon:g}, "
            f"got {member_limit:g}"
        )
    return variance_bound(variance, group_size, epsilon) + variance / (4 * (member_limit - 1))


def sufficient_group_size(variance: float, epsilon: float, deficit: float) -> int:
    """The least G at which `scarf_bound` is at most `deficit`, whatever the law. [PROVEN]

    ½(√(u + ε²) − ε) ≤ x is u ≤ (2x + ε)² − ε², u = v/G. `log_normal.group_size_for` gives the
    smaller G that log-normal ratios need.
    """
    _check(variance, 1, epsilon)
    if not 0 < deficit < 1:
        raise ValueError(f"deficit must be between 0 and 1, got {deficit:g}")
    return max(1, math.ceil(variance / ((2 * deficit + epsilon) ** 2 - epsilon**2)))


def _check(variance: float, group_size: int, epsilon: float) -> None:
    if not 0 <= variance < math.inf:
        raise ValueError(f"variance must be finite and at least 0, got {variance:g}")
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be finite and above 0, got {epsilon:g}")
