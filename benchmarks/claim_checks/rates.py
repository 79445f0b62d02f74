"""Orders in ε, G, lag and steps: worst-case laws and the tuned bound (claims 4 and 5)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from claim_checks.methods import trajectory_method
from claim_checks.table import Run, slope
from megatron_gmc.theory import bounds, groups, rates

METHODS: tuple[rates.Method, ...] = ("gmc", "tic_clip", "tic_mask")


def two_point_deficits(
    name: str, epsilon: float, high: Tensor, low: Tensor, chance: Tensor, group_size: int
) -> Tensor:
    """Exact E (1/G)Σ|ρ − w| when ρ is `high` with `chance` and `low` otherwise; float64 [laws].

    A group is told by how many of its members are high, which is binomial.
    """
    highs = torch.arange(group_size + 1)
    is_high = torch.arange(group_size)[None, :] < highs[:, None]
    ratio = torch.where(is_high, high[:, None, None], low[:, None, None])
    flat = ratio.reshape(-1, group_size)
    estimator = type(trajectory_method(name))(epsilon=epsilon)
    distance = (flat - groups.weights(estimator, flat.log())).abs().mean(1)
    ways = torch.tensor([math.comb(group_size, int(k)) for k in highs], dtype=torch.float64)
    chance_of = ways * chance[:, None] ** highs * (1 - chance[:, None]) ** (group_size - highs)
    return (chance_of * distance.reshape(len(high), -1)).sum(1)


def worst_deficit(name: str, epsilon: float, variance: float, group_size: int) -> float:
    """The largest deficit over two-point laws of mean 1 and the given variance, by grid."""
    jump = torch.logspace(math.log10(epsilon), math.log10(200 * group_size * epsilon), 1500,
                          dtype=torch.float64) * (1 + 1e-9)  # fmt: skip
    jump = jump[jump > variance]  # the low atom is 1 − v/jump
    low, chance = 1 - variance / jump, variance / (variance + jump**2)
    return float(two_point_deficits(name, epsilon, 1 + jump, low, chance, group_size).max())


def epsilon_orders(run: Run) -> None:
    """E6: slopes of the worst-case squared deficit in ε; the constant ¼."""
    epsilons = np.geomspace(0.003, 0.03, 7).tolist()
    variance = 1e-8
    curve: dict[str, list[float]] = {"x": epsilons}
    slopes: dict[str, float] = {}
    for name in METHODS:
        size = 8 if name == "gmc" else 1
        worst = [worst_deficit(name, e, variance, size) ** 2 for e in epsilons]
        slopes[name] = slope(epsilons, worst)
        curve[name] = worst
    run.series["claim4"] = curve
    run.near((4, "E6"), "TIC-mask: ε slope of the worst squared bias bound", -4, slopes["tic_mask"],
             0.1, "RECON")  # fmt: skip
    run.near((4, "E6"), "GMC, G=8: ε slope", -2, slopes["gmc"], 0.1, "RECON")
    run.refuted((4, "E6"), "against TIC-clip (detached): does ε⁻⁴ become ε⁻²?",
                "TIC-clip slope −4", f"TIC-clip slope {slopes['tic_clip']:.2f}, as GMC's: the gain "
                "over it is G² alone", abs(slopes["tic_clip"] + 2) <= 0.1)  # fmt: skip
    for size, expected in ((4, 0.9999), (16, 0.9998), (64, 0.9990)):
        chance, jump = torch.tensor([1e-5], dtype=torch.float64), 2 * size * 0.2
        low = 1 - chance * jump / (1 - chance)
        high = torch.tensor([1 + jump], dtype=torch.float64)
        variance = float(jump**2 * chance + (1 - low) ** 2 * (1 - chance))
        deficit = float(two_point_deficits("gmc", 0.2, high, low, chance, size))
        ratio = deficit / bounds.variance_bound(variance, size, 0.2)
        run.near((4, "E6"), f"the constant ¼ is reached, G={size}", expected, ratio, 5e-4, "PROVEN")


def tuned_orders(run: Run) -> None:
    """E9: exponents of the delay term after tuning the step size, by doubling one constant
    and searching the best step size again."""
    base = rates.Problem(smoothness=1.0, gradient_bound=1.5, overlap=1.2, gap=0.7, epsilon=1e-4,
                         group_size=8, lag=16, steps=10_000)  # fmt: skip

    def exponent(method: rates.Method, field: str, factor: float = 2.0) -> float:
        # The cap's own dependence on ε is a constant in the theorem: small ε leaves it near 1.
        moved = replace(base, **{field: type(getattr(base, field))(getattr(base, field) * factor)})
        before, after = least_delay_term(base, method), least_delay_term(moved, method)
        return math.log(after / before) / math.log(factor)

    cases: tuple[tuple[rates.Method, str, float], ...] = (
        ("gmc", "group_size", -0.4), ("gmc", "epsilon", -0.4), ("gmc", "lag", 0.8),
        ("gmc", "steps", -0.8), ("tic_mask", "epsilon", -0.8), ("tic_clip", "epsilon", -0.4),
        ("tic_clip", "group_size", 0.0),
    )  # fmt: skip
    for method, field, expected in cases:
        tag = "ABS" if (method, field) == ("gmc", "group_size") else "RECON"
        run.near((5, "E9"), f"tuned delay term, {method}: exponent of {field}", expected,
                 exponent(method, field), 1e-3, tag)  # fmt: skip
    run.near((5, "E9"), "closed form of the tuned term / its minimum over step sizes", 1.0,
             rates.tuned_delay_term(base, "gmc") / least_delay_term(base, "gmc"), 1e-9,
             "PROVEN")  # fmt: skip
    sizes = [2.0**k for k in range(1, 11)]
    run.series["claim5"] = {
        "x": sizes,
        **{
            m: [rates.tuned_delay_term(replace(base, group_size=int(g), epsilon=0.2), m)
                for g in sizes]
            for m in METHODS
        },
    }  # fmt: skip


def least_delay_term(problem: rates.Problem, method: rates.Method) -> float:
    """The least 2Δ/(ηN) + κη⁴, by ternary search over log η: convex there, no closed form used."""

    def part(log_step: float) -> float:
        terms = rates.convergence_bound(problem, method, math.exp(log_step))
        return terms.start + terms.bias

    low, high = -30.0, 10.0
    for _ in range(120):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if part(left) < part(right) else (left, high)
    return part((low + high) / 2)
