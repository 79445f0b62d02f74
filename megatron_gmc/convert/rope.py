"""The rotary embedding that a config.json asks for.

transformers 5 writes `rope_parameters`; before it was `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_gmc.convert.fields import JsonTree, positive

_BASE_KEYS = frozenset({"rope_type", "type", "rope_theta"})

# Llama 3's scaling as megatron-core computes it; the factor alone can be chosen there.
_LLAMA3: Mapping[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_rope(tree: JsonTree, *, llama3: bool) -> tuple[float, float | None]:
    """The base theta and, where the kind is Llama 3's, the scaling factor.

    Raises ValueError for another kind of scaling, for Llama 3's unless `llama3` says that the
    family knows it, and where two fields disagree.
    """
    thetas: dict[str, float] = {}
    factors: dict[str, float | None] = {}
    for key in ("rope_parameters", "rope_scaling"):
        parameters = tree.get(key)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            raise ValueError(f"{key}: {parameters!r} is no mapping")
        factors[key] = _factor(key, parameters, llama3=llama3)
        if "rope_theta" in parameters:
            thetas[f"{key}.rope_theta"] = positive(parameters, "rope_theta")
    if "rope_theta" in tree:
        thetas["rope_theta"] = positive(tree, "rope_theta")
    if not thetas:
        raise ValueError("rope_theta: missing, both at the top and in rope_parameters")
    if len(set(thetas.values())) > 1:
        raise ValueError(f"rope_theta: given twice and differently, {thetas}")
    if len(set(factors.values())) > 1:
        raise ValueError(f"rope_scaling: rope_parameters says otherwise, factors {factors}")
    return next(iter(thetas.values())), next(iter(factors.values()), None)


def _factor(key: str, parameters: JsonTree, *, llama3: bool) -> float | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    known = "'default' or 'llama3'" if llama3 else "'default'"
    if kind == "default" and not set(parameters) - _BASE_KEYS:
        return None
    if kind != "llama3" or not llama3:
        raise ValueError(f"{key}: {parameters!r} is not supported; rope_type must be {known}")
    unknown = sorted(set(parameters) - _BASE_KEYS - set(_LLAMA3) - {"factor"})
    if unknown:
        raise ValueError(f"{key}.{unknown[0]}: unknown field of Llama 3's rope scaling")
    for name, supported in _LLAMA3.items():
        if parameters.get(name) != supported:
            raise ValueError(
                f"{key}.{name}: {parameters.get(name)!r} is not supported; megatron-core scales "
                f"with {supported}"
            )
    try:
        return positive(parameters, "factor")
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from None
