"""What each trajectory-level method keeps and loses of log-normal ratios, no model involved.

log ρ is normal with standard deviation sd and mean −sd²/2, so E ρ = 1; G = 16, 20,000 groups.
Prints a Markdown table; the numbers are Monte Carlo, good to about a unit of the last digit shown
(largest weights and second moments at sd 2 are heavy-tailed and are good to some per cent).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gmc.estimators import ESTIMATORS, TrajectoryEstimator, TrajectoryRatios

GROUPS, SIZE, POOL = 20_000, 16, 16
SPREADS = (1.0, 2.0)
METHODS: tuple[tuple[str, dict[str, str]], ...] = (
    ("is", {}),
    ("snis", {}),
    ("gmc", {}),
    ("water_filling", {}),
    ("soft_threshold", {}),
    ("gmc", {"member_limit": "G^0.33"}),
    ("gmc_pooled", {}),
    ("tis_sequence", {}),
    ("tic_clip", {}),
    ("mis", {}),
    ("tic_mask", {}),
    ("none", {}),
)


def weights(method: TrajectoryEstimator, log_ratio_N: Tensor, pool: int) -> Tensor:
    """The weights of all groups, `pool` groups to a batch."""
    group_N = torch.arange(pool).repeat_interleave(SIZE)
    ones_N = torch.ones(pool * SIZE)
    batches = [
        method.weights(TrajectoryRatios(part, group_N, ones_N, ones_N.long(), pool))
        for part in log_ratio_N.split(pool * SIZE)
    ]
    return torch.cat(batches)


def row(name: str, parameters: dict[str, str]) -> str:
    method = ESTIMATORS[name](**parameters)
    assert isinstance(method, TrajectoryEstimator)
    pool = POOL if method.scope == "batch" else GROUPS
    label = " ".join([f"`{name}`", *(f"`{value}`" for value in parameters.values())])
    cells = [label + (f", {POOL} groups" if method.scope == "batch" else "")]
    for spread in SPREADS:
        generator = torch.Generator().manual_seed(0)
        normal_N = torch.randn(GROUPS * SIZE, generator=generator, dtype=torch.float64)
        log_ratio_N = spread * normal_N - spread**2 / 2
        weight_N = weights(method, log_ratio_N, pool)
        cells += [
            f"{weight_N.mean():.2f}",
            f"{(log_ratio_N.exp() - weight_N).abs().mean():.3f}",
            f"{weight_N.square().mean() / SIZE:.3f}",
            f"{weight_N.max():.3g}",
        ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    torch.set_num_threads(1)
    columns = [f"sd(ℓ) = {s:g}: {c}" if c == "retained" else c
               for s in SPREADS
               for c in ("retained", "mean \\|ρ − w\\|", "E w²/G", "largest w")]  # fmt: skip
    print(f"| | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for name, parameters in METHODS:
        print(row(name, parameters))


if __name__ == "__main__":
    main()
