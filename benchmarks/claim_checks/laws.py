"""Log-normal ratios: closed forms, the deficit against G, retained mass, sub-groups (claim 6)."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from claim_checks.methods import EPSILON, trajectory_method
from claim_checks.table import Run
from megatron_gmc.theory import bounds, groups, log_normal

GROUP_SIZES = (4, 8, 16, 64, 256)
# sd(ℓ) → TIC-clip, TIC-mask, GMC at GROUP_SIZES; Monte Carlo of s.e. ≤ 2e-3 for GMC.
DEFICITS = {
    0.5: (0.1311, 0.4544, (0.0411, 0.0180, 0.0057, 0.00008, 0.0)),
    1.0: (0.3276, 0.6246, (0.1627, 0.1033, 0.0602, 0.0126, 0.0006)),
    2.0: (0.6532, 0.8183, (0.473, 0.382, 0.301, 0.167, 0.076)),
}
# sd(ℓ) → retained mass under TIC-clip, mask, GMC at 8, 16, 64; median M and ESS/G at G = 16.
RETAINED = {
    0.5: (0.87, 0.55, 0.98, 0.99, 1.00, 0.99, 0.81),
    1.0: (0.67, 0.38, 0.90, 0.94, 0.99, 0.94, 0.52),
    2.0: (0.35, 0.18, 0.62, 0.70, 0.83, 0.63, 0.25),
    3.0: (0.15, 0.08, 0.32, 0.39, 0.53, 0.22, 0.17),
    4.0: (0.05, 0.03, 0.12, 0.16, 0.24, 0.03, 0.13),
}
# G → lost mass and E w²/G of GMC, of the member limit b = G^(1/3), of TIC-clip, at sd(ℓ) = 1.
MEMBER_LIMIT = {
    8: ((0.105, 0.216), (0.226, 0.120), (0.328, 0.076)),
    64: ((0.013, 0.040), (0.078, 0.026), (0.328, 0.010)),
    256: ((0.000, 0.011), (0.029, 0.008), (0.328, 0.002)),
}


def draw(sd: float, draws: int, group_size: int, seed: int) -> Tensor:
    """Log-ratios of independent groups, float64 [draws, G]."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(draws, group_size, generator=generator, dtype=torch.float64)
    return normal * sd - sd * sd / 2


def closed_forms(run: Run) -> None:
    """E1: the closed forms against the registry's weights on seeded draws, as z-scores."""
    draws = run.pick(400_000, 4_000_000)
    worst, pairs = 0.0, 0
    for sd in DEFICITS:
        log_ratio = draw(sd, draws, 1, seed=1)
        for epsilon in (0.1, 0.2, 0.5):
            cases = (
                ("tic_clip", log_normal.tic_clip_deficit(sd, epsilon)),
                ("tic_mask", log_normal.tic_mask_deficit(sd, epsilon)),
            )
            for name, expected in cases:
                estimator = type(trajectory_method(name))(epsilon=epsilon)
                lost = log_ratio.exp() - groups.weights(estimator, log_ratio)
                error = float(lost.std()) / math.sqrt(draws)
                worst = max(worst, abs(float(lost.mean()) - expected) / error)
                pairs += 1
    run.at_most((6, "E1"), f"log-normal closed forms, {draws:,} draws, {pairs} pairs: worst |z|",
                4.5, worst, "PROVEN")  # fmt: skip


def deficit_against_group_size(run: Run) -> None:
    """E5: E(M − c)₊ by quadrature against the table, the bound, G and TIC-clip."""
    curve: dict[str, list[float]] = {"x": [float(g) for g in GROUP_SIZES]}
    bounded = falling = below_clip = True
    for sd, (clip, mask, table) in DEFICITS.items():
        where = (6, "E5")
        run.near(where, f"sd(ℓ)={sd:g}: TIC-clip deficit", clip,
                 log_normal.tic_clip_deficit(sd, EPSILON), 6e-5, "PROVEN")  # fmt: skip
        run.near(where, f"sd(ℓ)={sd:g}: TIC-mask deficit", mask,
                 log_normal.tic_mask_deficit(sd, EPSILON), 6e-5, "PROVEN")  # fmt: skip
        values = [log_normal.gmc_deficit(sd, g, EPSILON).value for g in GROUP_SIZES]
        for size, expected, value in zip(GROUP_SIZES, table, values, strict=True):
            run.near(where, f"sd(ℓ)={sd:g}: GMC deficit, G={size}", expected, value,
                     min(6e-3, 0.02 * expected + 5e-5), "NUM")  # fmt: skip
        variance = log_normal.ratio_variance(sd)
        limit = [bounds.deficit_bound(variance, g, EPSILON) for g in GROUP_SIZES]
        bounded &= all(v <= b for v, b in zip(values, limit, strict=True))
        falling &= all(a >= b for a, b in pairwise(values))
        below_clip &= values[0] <= clip
        curve[f"GMC, sd {sd:g}"] = values
        curve[f"TIC-clip, sd {sd:g}"] = [clip] * len(values)
    run.holds((6, "E5"), "GMC: below the Scarf form, never rising with G, below TIC-clip",
              "all three", f"{bounded}, {falling}, {below_clip}",
              bounded and falling and below_clip, "PROVEN")  # fmt: skip
    run.series["claim6"] = curve
    for sd, expected in ((0.5, 6), (1.0, 35), (1.5, 170), (2.0, 1072)):
        size = bounds.sufficient_group_size(log_normal.ratio_variance(sd), EPSILON, 0.05)
        run.near((6, "E5"), f"sd(ℓ)={sd:g}: G that suffices for 5 % by the bound", expected,
                 size, 0.0, "PROVEN")  # fmt: skip


def sub_groups(run: Run) -> None:
    """E13: a mass over parts of the group costs deficit; pooling over groups saves it."""
    table = {1: 0.329, 2: 0.238, 4: 0.163, 8: 0.104, 16: 0.061}
    values = {g: log_normal.gmc_deficit(1.0, g, EPSILON).value for g in table}
    for size, expected in table.items():
        run.near((6, "E13"), f"sd(ℓ)=1, G=16, mass over sub-groups of {size}: deficit",
                 expected, values[size], 2e-3, "NUM")  # fmt: skip
    pooled = log_normal.gmc_deficit(1.0, 128, EPSILON).value
    run.near((6, "E13"), "sd(ℓ)=1, G=16, mass pooled over 8 groups: deficit", 0.0040, pooled,
             5e-4, "PROVEN")  # fmt: skip


def retained(run: Run) -> None:
    """E15: the share of expected gradient weight that survives, and what groups look like."""
    draws = run.pick(100_000, 1_000_000)
    for sd, (clip, mask, g8, g16, g64, median, ess) in RETAINED.items():
        by_size = {g: log_normal.retained_mass(sd, g, EPSILON) for g in (8, 16, 64)}
        cases = (("TIC-clip", clip, by_size[8].tic_clip), ("mask", mask, by_size[8].tic_mask),
                 ("GMC G=8", g8, by_size[8].gmc), ("GMC G=16", g16, by_size[16].gmc),
                 ("GMC G=64", g64, by_size[64].gmc))  # fmt: skip
        for name, expected, value in cases:
            run.near((6, "E15"), f"sd(ℓ)={sd:g}: retained mass, {name}", expected, value, 0.01,
                     "NUM")  # fmt: skip
        ratio = draw(sd, draws, 16, seed=15).exp()
        share = ratio.sum(1).square() / (16 * ratio.square().sum(1))
        run.near((6, "E15"), f"sd(ℓ)={sd:g}: median M, G=16", median,
                 float(ratio.mean(1).median()), 0.01, "NUM")  # fmt: skip
        run.near((6, "E15"), f"sd(ℓ)={sd:g}: ESS/G, G=16", ess, float(share.mean()), 0.01,
                 "NUM")  # fmt: skip


def member_limit(run: Run) -> None:
    """Beyond the paper: a limit b = G^(1/3) on each member inside the group's cap."""
    for size, expected in MEMBER_LIMIT.items():
        log_ratio = draw(1.0, run.pick(2**21, 2**23) // size, size, seed=7)
        gmc = groups.weights(trajectory_method("gmc"), log_ratio)
        forms = (
            ("GMC", gmc, expected[0]),
            ("member limit", gmc.clamp(max=size ** (1 / 3)), expected[1]),
            ("TIC-clip", groups.weights(trajectory_method("tic_clip"), log_ratio), expected[2]),
        )
        for name, weight, (lost, second) in forms:
            measured = (1 - float(weight.mean()), float(weight.square().mean()) / size)
            run.near((0, "P7"), f"sd(ℓ)=1, G={size}: lost mass, {name}", lost, measured[0], 2e-3,
                     "NUM")  # fmt: skip
            run.near((0, "P7"), f"sd(ℓ)=1, G={size}: E w²/G, {name}", second, measured[1], 1e-3,
                     "NUM")  # fmt: skip
