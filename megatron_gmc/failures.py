"""Which exceptions are a user's or the world's fault, and the line or two that they deserve."""

from __future__ import annotations

import errno

from megatron_gmc.errors import NonFiniteError, OutputError, UserError
from megatron_gmc.rollout.engine import EngineError

EXIT_FAILED = 1
EXIT_USER = 2
EXIT_REQUEUE = 75
"""A signal stopped the run, and a checkpoint has everything: start the same command again. It is
sysexits.h's EX_TEMPFAIL; a launch script requeues its job on it."""

# How gloo says in a collective that the process at the other end is gone.
_LOST_RANK = ("Connection closed by peer", "Connection reset by peer")


def failure_message(error: BaseException) -> str | None:
    """What to print instead of a traceback; None for a bug, whose traceback is wanted."""
    if isinstance(error, EngineError):
        return f"{error}; once that is mended, --resume continues from the last checkpoint"
    if isinstance(error, UserError | NonFiniteError | OutputError):
        return str(error)
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_RANK):
        return "lost the connection to another rank, whose own message says why"
    cause = _disk_error(error)
    if cause is not None:
        return (
            f"cannot write {cause.filename or 'the run folder'}: {cause.strerror}; free some "
            "space or choose another train.output_dir, then continue with --resume"
        )
    return None


def _disk_error(error: BaseException | None) -> OSError | None:
    """The full or read-only disk behind `error`, through what libraries wrapped around it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EROFS,
            errno.EACCES,
        ):
            return error
        error = error.__cause__ or error.__context__
    return None
