"""The registry's methods at one common cap, by name."""

from __future__ import annotations

from dataclasses import fields

from megatron_gmc.estimators import ESTIMATORS, Estimator, TrajectoryEstimator

EPSILON = 0.2

IN_CLASS = ("gmc", "tic_clip", "tic_mask", "snis", "none", "soft_threshold", "water_filling")
"""Trajectory weights whose mean over a group is at most c, so that ‖ĝ‖ ≤ cB."""


def method(name: str) -> Estimator:
    """The registry's method with ε = 0.2 where it has an ε, and its own defaults elsewhere."""
    kind = ESTIMATORS[name]
    if any(field.name == "epsilon" for field in fields(kind)):
        return kind(epsilon=EPSILON)
    return kind()


def trajectory_method(name: str) -> TrajectoryEstimator:
    chosen = method(name)
    assert isinstance(chosen, TrajectoryEstimator), name
    return chosen


def available(names: tuple[str, ...]) -> list[str]:
    """Those of the names that the registry has, in the order given."""
    return [name for name in names if name in ESTIMATORS]
