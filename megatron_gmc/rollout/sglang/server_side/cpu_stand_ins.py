"""Lets SGLang's modules load on a machine without CUDA, by standing in for what they import.

SGLang imports torchvision, sgl_kernel and triton where it defines GPU paths, which a CPU with the
torch_native attention backend never takes. A stand-in can be imported, named, subclassed and used
as a decorator; calling anything else of it raises NotImplementedError with the name. Packages that
are installed win over their stand-in. Probes for a package (`importlib.util.find_spec`) still say
that it is absent.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

STOOD_IN_FOR = ("torchvision", "sgl_kernel", "triton")
# triton's kernels are decorated functions; what a decorator of another package returns is called
_DECORATING = "triton"


class _Name:
    """Any lower-case attribute of a stand-in."""

    def __init__(self, path: str) -> None:
        self.__name__ = self.__qualname__ = self._path = path

    def __getattr__(self, attribute: str) -> _Name:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Name(f"{self._path}.{attribute}")

    def __call__(self, *arguments: object, **options: object) -> object:
        if self._path.split(".")[0] != _DECORATING:
            raise NotImplementedError(f"{self._path} needs a GPU build of SGLang")
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return _unchanged


def _unchanged(function: Callable[..., object]) -> Callable[..., object]:
    return function


class _Subclassable:
    """Any capitalised attribute of a stand-in."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__()

    def __init__(self, *arguments: object, **options: object) -> None:
        self.arguments = arguments
        self.__dict__.update(options)


class _StandIn(ModuleType):
    __version__ = "0"

    def __getattr__(self, attribute: str) -> object:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        value: object
        if attribute[0].isupper():
            value = type(attribute, (_Subclassable,), {"__module__": self.__name__})
        else:
            value = _Name(f"{self.__name__}.{attribute}")
        setattr(self, attribute, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] not in STOOD_IN_FOR:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        if spec.name == "triton":  # called while modules load, so these must be real
            module.cdiv = lambda a, b: -(a // -b)  # type: ignore[attr-defined]
            module.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: a stand-in makes its attributes when they are asked for."""


def install() -> None:
    """Stand in for what is not installed, in this process; may be called again."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.append(_Finder())  # last, so that what is installed is found first
    find_spec = importlib.util.find_spec

    def probe(name: str, package: str | None = None) -> ModuleSpec | None:
        spec = find_spec(name, package)
        return None if spec is not None and isinstance(spec.loader, _Finder) else spec

    importlib.util.find_spec = probe
