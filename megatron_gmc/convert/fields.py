"""Typed reading of config.json's fields; every ValueError starts with the field's name."""

from __future__ import annotations

from collections.abc import Mapping

JsonTree = Mapping[str, object]


def field(tree: JsonTree, key: str) -> object:
    if tree.get(key) is None:
        raise ValueError(f"{key}: missing")
    return tree[key]


def count(tree: JsonTree, key: str) -> int:
    value = field(tree, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: {value!r} must be a whole number above 0")
    return value


def positive(tree: JsonTree, key: str) -> float:
    value = field(tree, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{key}: {value!r} must be a number above 0")
    return float(value)


def flag(tree: JsonTree, key: str) -> bool:
    value = field(tree, key)
    if not isinstance(value, bool):
        raise ValueError(f"{key}: {value!r} must be true or false")
    return value
