"""Faults that are reported as one message and not as a traceback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class UserError(Exception):
    """A fault of the input; exit code 2."""


class ConfigError(UserError):
    """A config, or a file that it names, that cannot be run."""


class OutputError(RuntimeError):
    """Something of a run's folder could not be written; what was there before still is."""


class NonFiniteError(RuntimeError):
    """A value that is not finite, found before the optimizer saw it.

    `trajectories` are indexes into the step's batch; empty where no single one can be named.
    """

    def __init__(self, message: str, trajectories: Sequence[int]) -> None:
        super().__init__(message)
        self.trajectories = tuple(trajectories)


@contextmanager
def blamed_on(field: str) -> Iterator[None]:
    """Turn a ValueError about what the config's `field` names into a ConfigError that says so."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from error
