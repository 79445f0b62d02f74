"""Each method's weights from its formula, naively: many decimal digits, loops over groups.

`Decimal` has no overflow in this range, so nothing here is in log space. It imports nothing of the
package under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, localcontext
from typing import Any, NamedTuple

Params = Mapping[str, Any]
"""A method's parameters; one that is off is None or absent."""

DIGITS = 400
"""More than lie between e^700 and a weight."""


class Member(NamedTuple):
    """A trajectory as a method sees it."""

    log_ratio: float
    tokens: int = 1
    advantage: float = 1.0
    behaviour: float = 0.0
    """Sum of the behaviour log-probs."""


GroupWeights = Callable[[list[Member], list[Decimal], Params], list[Decimal]]
TokenWeight = Callable[[Decimal, float, Params], Decimal]


def decimal_exp(value: float) -> Decimal:
    with localcontext(prec=DIGITS):
        return Decimal(value).exp()


def _cap(params: Params) -> Decimal:
    return 1 + Decimal(params["epsilon"])


def _mean(values: Sequence[Decimal]) -> Decimal:
    return sum(values, Decimal(0)) / len(values)


def _gmc(members: list[Member], ratios: list[Decimal], params: Params) -> list[Decimal]:
    mass, cap = _mean(ratios), _cap(params)
    weights = [ratio if mass <= cap else ratio * cap / mass for ratio in ratios]
    limit = params.get("member_limit")
    if limit is None:
        return weights
    if isinstance(limit, str):
        limit = max(Decimal(len(ratios)) ** Decimal(limit.removeprefix("G^")), cap)
    return [min(weight, Decimal(limit)) for weight in weights]


def _water_filling(members: list[Member], ratios: list[Decimal], params: Params) -> list[Decimal]:
    total = _cap(params) * len(ratios)
    if sum(ratios) <= total:
        return ratios
    ordered = sorted(ratios, reverse=True)
    for cut in range(1, len(ordered) + 1):
        level = (total - sum(ordered[cut:])) / cut
        if ordered[cut - 1] >= level and (cut == len(ordered) or ordered[cut] <= level):
            return [min(ratio, level) for ratio in ratios]
    raise AssertionError("some number of members is cut")


def _soft_threshold(members: list[Member], ratios: list[Decimal], params: Params) -> list[Decimal]:
    total = _cap(params) * len(ratios)
    if sum(ratios) <= total:
        return ratios
    ordered = sorted(ratios, reverse=True)
    for kept in range(len(ordered), 0, -1):
        threshold = (sum(ordered[:kept]) - total) / kept
        if ordered[kept - 1] > threshold:
            return [max(ratio - threshold, Decimal(0)) for ratio in ratios]
    raise AssertionError("the largest member is kept")


def _within(ratio: Decimal, lower: float | None, upper: float | None) -> Decimal:
    outside = upper is not None and ratio > Decimal(upper)
    outside |= lower is not None and ratio < Decimal(lower)
    return Decimal(0) if outside else ratio


def _clipped(ratio: Decimal, advantage: float, params: Params) -> Decimal:
    high, low = 1 + Decimal(params["clip_high"]), 1 - Decimal(params["clip_low"])
    stopped = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
    return Decimal(0) if stopped else ratio


def _gspo(members: list[Member], ratios: list[Decimal], params: Params) -> list[Decimal]:
    return [
        _clipped(decimal_exp(m.log_ratio) ** (1 / Decimal(max(m.tokens, 1))), m.advantage, params)
        for m in members
    ]


def _gepo(members: list[Member], ratios: list[Decimal], params: Params) -> list[Decimal]:
    sizes = [Decimal(max(m.tokens, 1)) for m in members]
    q = [(Decimal(m.behaviour) / n).exp() for m, n in zip(members, sizes, strict=True)]
    p = [
        ((Decimal(m.behaviour) + Decimal(m.log_ratio)) / n).exp()
        for m, n in zip(members, sizes, strict=True)
    ]
    expected = sum(x * x for x in q) / sum(q)
    return [_clipped(x / expected, m.advantage, params) for x, m in zip(p, members, strict=True)]


GROUP_WEIGHTS: dict[str, GroupWeights] = {
    "gmc": _gmc,
    "gmc_pooled": _gmc,
    "gmc_differentiable": _gmc,
    "water_filling": _water_filling,
    "soft_threshold": _soft_threshold,
    "none": lambda members, ratios, params: [Decimal(1) for _ in ratios],
    "is": lambda members, ratios, params: ratios,
    "snis": lambda members, ratios, params: [ratio / _mean(ratios) for ratio in ratios],
    "tic_clip": lambda members, ratios, params: [min(r, _cap(params)) for r in ratios],
    "tic_mask": lambda members, ratios, params: [
        _within(r, None, 1 + params["epsilon"]) for r in ratios
    ],
    "tis_sequence": lambda members, ratios, params: [
        min(r, Decimal(params["cap"])) for r in ratios
    ],
    "mis": lambda members, ratios, params: [
        _within(r, params.get("lower"), params["upper"]) for r in ratios
    ],
    "gspo": _gspo,
    "gepo": _gepo,
}


def _grpo(ratio: Decimal, advantage: float, params: Params) -> Decimal:
    dual_clip = params.get("dual_clip")
    if dual_clip is not None and advantage < 0 and ratio > Decimal(dual_clip):
        return Decimal(0)
    return _clipped(ratio, advantage, params)


def _cispo(ratio: Decimal, advantage: float, params: Params) -> Decimal:
    low = params.get("weight_min")
    raised = ratio if low is None else max(ratio, Decimal(low))
    return min(raised, Decimal(params["weight_max"]))


TOKEN_WEIGHTS: dict[str, TokenWeight] = {
    "grpo": _grpo,
    "cispo": _cispo,
    # One optimizer step a batch: the proximal policy is the current one, and no clip is reached.
    "tis_token": lambda ratio, advantage, params: min(ratio, Decimal(params["cap"])),
    "icepop": lambda ratio, advantage, params: _within(ratio, params["lower"], params["upper"]),
    "decoupled_ppo": lambda ratio, advantage, params: ratio,
}
TOKEN_METHODS = {*TOKEN_WEIGHTS, "m2po"}


def trajectory_weights(
    method: str, params: Params, members: Sequence[Member], groups: Sequence[int]
) -> list[float]:
    """Weight of each trajectory, in the order given."""
    if method == "gmc_pooled":
        groups = [0] * len(groups)
    result = [0.0] * len(groups)
    with localcontext(prec=DIGITS):
        for group in set(groups):
            indexes = [i for i, g in enumerate(groups) if g == group]
            chosen = [members[i] for i in indexes]
            ratios = [decimal_exp(m.log_ratio) for m in chosen]
            weights = GROUP_WEIGHTS[method](chosen, ratios, params)
            for i, weight in zip(indexes, weights, strict=True):
                result[i] = float(weight)
    return result


def token_weights(
    method: str, params: Params, log_ratios: Sequence[float], advantages: Sequence[float]
) -> list[float]:
    """Weight of each token, from its log-ratio and its trajectory's advantage."""
    if method == "m2po":
        return _m2po(params, log_ratios, advantages)
    with localcontext(prec=DIGITS):
        return [
            float(TOKEN_WEIGHTS[method](decimal_exp(r), a, params))
            for r, a in zip(log_ratios, advantages, strict=True)
        ]


def _m2po(params: Params, log_ratios: Sequence[float], advantages: Sequence[float]) -> list[float]:
    """One token after another is left out, from the largest square down."""
    harmful = [
        i
        for i, (r, a) in enumerate(zip(log_ratios, advantages, strict=True))
        if (a > 0 and r > 0) or (a < 0 and r < 0)
    ]
    kept = sorted(harmful, key=lambda i: abs(log_ratios[i]))
    while kept and sum(log_ratios[i] ** 2 for i in kept) / len(kept) > params["second_moment"]:
        kept.pop()
    out = set(harmful) - set(kept)
    return [0.0 if i in out else float(decimal_exp(r)) for i, r in enumerate(log_ratios)]


def method_weights(
    method: str,
    params: Params,
    members: Sequence[Member],
    groups: Sequence[int],
    token_log_ratios: Sequence[Sequence[float]],
) -> list[list[float]]:
    """Weight of each token of each trajectory, for either kind of method."""
    if method not in TOKEN_METHODS:
        weights = trajectory_weights(method, params, members, groups)
        return [[w] * len(r) for w, r in zip(weights, token_log_ratios, strict=True)]
    flat = [r for ratios in token_log_ratios for r in ratios]
    advantages = [
        m.advantage for m, ratios in zip(members, token_log_ratios, strict=True) for _ in ratios
    ]
    weights = token_weights(method, params, flat, advantages)
    result, start = [], 0
    for ratios in token_log_ratios:
        result.append(weights[start : start + len(ratios)])
        start += len(ratios)
    return result


def masses(log_ratios: Sequence[float], groups: Sequence[int]) -> list[Decimal]:
    """M of groups 0, 1, …"""
    with localcontext(prec=DIGITS):
        return [
            _mean([decimal_exp(r) for r, g in zip(log_ratios, groups, strict=True) if g == group])
            for group in range(max(groups) + 1)
        ]
