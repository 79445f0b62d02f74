"""Each method's weights from its formula, naively: 60 decimal digits, loops over groups.

`Decimal` has no overflow in this range, so nothing here is in log space.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, localcontext

Params = Mapping[str, float]
GroupWeights = Callable[[list[Decimal], Params], list[Decimal]]


def _cap(params: Params) -> Decimal:
    return 1 + Decimal(params["epsilon"])


def _gmc(ratios: list[Decimal], params: Params) -> list[Decimal]:
    mass = sum(ratios, Decimal(0)) / len(ratios)
    return [ratio if mass <= _cap(params) else ratio * _cap(params) / mass for ratio in ratios]


GROUP_WEIGHTS: dict[str, GroupWeights] = {
    "gmc": _gmc,
    "none": lambda ratios, params: [Decimal(1) for _ in ratios],
    "is": lambda ratios, params: ratios,
    "tic_clip": lambda ratios, params: [min(ratio, _cap(params)) for ratio in ratios],
    "tic_mask": lambda ratios, params: [
        ratio if ratio <= _cap(params) else Decimal(0) for ratio in ratios
    ],
}


def trajectory_weights(
    method: str, params: Params, log_ratios: Sequence[float], groups: Sequence[int]
) -> list[float]:
    """Weight of each trajectory, in the order given."""
    result = [0.0] * len(groups)
    with localcontext(prec=60):
        for group in set(groups):
            members = [i for i, g in enumerate(groups) if g == group]
            ratios = [Decimal(log_ratios[i]).exp() for i in members]
            weights = GROUP_WEIGHTS[method](ratios, params)
            for i, weight in zip(members, weights, strict=True):
                result[i] = float(weight)
    return result


def masses(log_ratios: Sequence[float], groups: Sequence[int]) -> list[Decimal]:
    """M of groups 0, 1, …"""
    with localcontext(prec=60):
        return [
            sum((Decimal(r).exp() for r, g in zip(log_ratios, groups, strict=True) if g == group))
            / Decimal(list(groups).count(group))
            for group in range(max(groups) + 1)
        ]
