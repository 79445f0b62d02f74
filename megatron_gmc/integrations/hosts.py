"""What every adapter checks of the framework it sits in, before training starts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

UNTRIED = "MEGATRON_GMC_UNTRIED"
"""Environment variable: comma-separated packages whose untried versions are let through."""


class HostError(RuntimeError):
    """The framework is not one that the adapter was tried with."""


def check_version(package: str, tried: tuple[str, ...]) -> None:
    """Refuse an installed version that does not begin with one of `tried`; raises HostError."""
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise HostError(
            f"{package} is not installed; this adapter was tried with {package} {', '.join(tried)}"
        ) from None
    if any(installed == one or installed.startswith(one + ".") for one in tried):
        return
    if package in os.environ.get(UNTRIED, "").split(","):
        return
    raise HostError(
        f"{package} {installed} was not tried with this adapter; tried: {', '.join(tried)}. "
        f"{UNTRIED}={package} lets it run all the same"
    )


def check_signature(package: str, function: Callable[..., object], names: tuple[str, ...]) -> None:
    """Refuse a function of the framework without the parameters that are used; HostError."""
    found = list(inspect.signature(function).parameters)
    missing = [name for name in names if name not in found]
    if missing:
        raise HostError(
            f"{package} {version(package)}: {function.__qualname__}({', '.join(found)}) has no "
            f"parameter {', '.join(missing)}, which this adapter uses"
        )


def refuse(host: str, wrong: Mapping[str, str]) -> None:
    """Raise one ValueError that names every setting that is wrong and what would be right."""
    if wrong:
        lines = "".join(f"\n  {setting}: {right}" for setting, right in wrong.items())
        raise ValueError(f"{host} cannot train with these weights as it is set up:{lines}")
