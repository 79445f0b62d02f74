"""Change what megatron's modules see of torch and of each other, and take it back.

torch itself stays as it is: modules of megatron are given, when they are imported, a view on torch
in which some attributes are replaced. Nothing here knows what is replaced or why.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

import torch


class View:
    """A module in which some attributes are replaced and the others are its own."""

    def __init__(self, module: ModuleType, **replaced: object) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


# What megatron's modules know as `torch`.
CUDA = View(torch.cuda, random=View(torch.cuda.random))
TORCH = View(torch, cuda=CUDA)

_on_import: dict[str, list[Callable[[ModuleType], None]]] = {}


class _Loader(SourceFileLoader):
    """Runs a module of megatron, then gives it the view and the patches that wait for it."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if "torch" in vars(module):
            vars(module)["torch"] = TORCH
        for patch in _on_import.get(module.__name__, []):
            patch(module)


class _Finder(MetaPathFinder):
    """Finds modules of megatron where Python would, to load them with `_Loader`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("megatron."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def watch_imports() -> None:
    """From now on give megatron's modules the view; those imported before keep torch."""
    sys.meta_path.insert(0, _Finder())


class Patches:
    """A set of changes that can be undone."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: object, name: str, value: object) -> None:
        """Set `owner.name` to `value`."""
        own = vars(owner)
        restore = (
            functools.partial(setattr, owner, name, own[name])
            if name in own
            else functools.partial(delattr, owner, name)
        )
        setattr(owner, name, value)
        self._undo.append(restore)

    def when_imported(self, module: str, patch: Callable[[ModuleType], None]) -> None:
        """Call `patch` with the module once it has been imported, at once if it has been."""
        waiting = _on_import.setdefault(module, [])
        waiting.append(patch)
        self._undo.append(lambda: waiting.remove(patch))
        if module in sys.modules:
            patch(sys.modules[module])

    def undo(self) -> None:
        """Put everything back, the last change first."""
        while self._undo:
            self._undo.pop()()


def called_by_megatron() -> bool:
    """Whether the caller of the function that asks is a module of megatron."""
    caller: str = sys._getframe(2).f_globals.get("__name__", "")
    return caller.startswith("megatron.")
