"""Draws docs/capping.png: one group of eight ratios, and what three methods make of it.

python benchmarks/capping_figure.py docs/capping.png
"""

from __future__ import annotations

import sys

import matplotlib
import torch

from megatron_gmc.estimators import ESTIMATORS, TrajectoryEstimator, TrajectoryRatios

RATIOS = (4.2, 2.4, 1.5, 1.1, 0.9, 0.6, 0.4, 0.2)
PANELS = (("gmc", "shrinks all alike"), ("tic_clip", "cuts each one"), ("tic_mask", "drops some"))


def main() -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    ratio_N = torch.tensor(RATIOS, dtype=torch.float64)
    zeros_N, ones_N = torch.zeros(len(RATIOS), dtype=torch.int64), torch.ones(len(RATIOS))
    ratios = TrajectoryRatios(ratio_N.log(), zeros_N, ones_N, ones_N.long(), 1)
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(10, 2.8), sharey=True)
    for axis, (name, what) in zip(axes, PANELS, strict=True):
        method = ESTIMATORS[name]()
        assert isinstance(method, TrajectoryEstimator)
        weight_N = method.weights(ratios)
        place = range(len(RATIOS))
        axis.bar(place, RATIOS, color="0.85", label="ratio ρ")
        axis.bar(place, weight_N.tolist(), width=0.5, color="tab:blue", label="weight")
        axis.axhline(1.2, color="tab:red", linewidth=1, linestyle="--", label="cap 1.2")
        axis.set_title(f"{name}: {what}\nmean weight {weight_N.mean():.2f} of {ratio_N.mean():.2f}")
        axis.set_xlabel("trajectories of a group")
        axis.set_xticks([])
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=100)


if __name__ == "__main__":
    main()
