"""Stand-ins for packages that a framework imports and that have no part in what is tested."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest import mock


def _remote(*arguments: object, **_: object) -> object:
    """`ray.remote` without Ray: the class or function itself, with or without arguments."""
    return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else lambda it: it


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _remote if name == "remote" else mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder:
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name.split(".")[0] not in self._packages:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in_for(*packages: str) -> None:
    """Let these packages be imported, with anything at all inside; for a process of its own."""
    sys.meta_path.insert(0, _Finder(packages))  # type: ignore[arg-type]
