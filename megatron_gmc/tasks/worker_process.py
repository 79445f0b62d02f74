"""A process that scores one response at a time, and can be ended at any moment.

Each process has a pipe of its own. Pools that share one queue share its locks too: a worker that
the kernel kills while it holds one leaves the others waiting for ever.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from megatron_gmc.tasks import grade_worker
from megatron_gmc.tasks.grade_worker import FailureReason, Kind

_START_LIMIT_S = 120.0
"""Importing a scorer takes seconds; one that takes minutes hangs."""
_START_ATTEMPTS = 3
"""The kernel may kill for memory during a start too; a scorer that cannot load fails each time."""
_EXIT_LIMIT_S = 1.0
"""Between closing its pipe and having an exit code, a dying process needs a moment."""


class ScoringFailed(Exception):
    """The scorer gave no number for a response."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class WorkerProcess:
    """Scores responses in a spawned process, which starts with the first one.

    One caller at a time; `kill` alone may come from another thread.
    """

    def __init__(self, kind: Kind, option: str | None) -> None:
        self._kind = kind
        self._option = option
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._ended = False

    def score(self, response: str, answer: str, metadata: str, timeout_s: float) -> float:
        """Score one response. Raises ScoringFailed, and RuntimeError if no process can start."""
        try:
            return self._score_once(response, answer, metadata, timeout_s)
        except ScoringFailed as failure:
            if failure.reason != "died" or self._ended:
                raise
        # Once more: the kernel may have killed the process through no fault of this response.
        return self._score_once(response, answer, metadata, timeout_s)

    def _score_once(self, response: str, answer: str, metadata: str, timeout_s: float) -> float:
        connection = self._running()
        try:
            connection.send((response, answer, metadata))
            if not connection.poll(timeout_s):
                self.stop()
                raise ScoringFailed("timeout", f"took longer than {timeout_s} s")
            outcome = connection.recv()
        except (EOFError, OSError):
            code = self._exit_code()
            raise ScoringFailed("died", f"ended its process with exit code {code}") from None
        if isinstance(outcome, float):
            return outcome
        reason, detail = outcome
        raise ScoringFailed(reason, detail)

    def kill(self) -> None:
        """End the process in the middle of whatever it does; no other takes its place."""
        self._ended = True
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """End the process and wait until it is gone; the next `score` starts a new one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exit_code(self) -> int | None:
        assert self._process is not None, "only a started process can end"
        self._process.join(_EXIT_LIMIT_S)
        code = self._process.exitcode
        self.stop()
        return code

    def _running(self) -> Connection:
        if self._process is not None and not self._process.is_alive():
            self.stop()
        if self._connection is not None:
            return self._connection
        for _ in range(_START_ATTEMPTS):
            connection = self._start()
            if self._ended:
                raise ScoringFailed("died", "was ended before it could score")
            if connection is not None:
                return connection
        raise RuntimeError(
            f"a worker process of the {self._kind} grader did not start in {_START_ATTEMPTS} "
            "attempts: see its output above"
        )

    def _start(self) -> Connection | None:
        """Start the process; None where it ends or hangs before it is ready."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(
            target=grade_worker.serve, args=(theirs, self._kind, self._option), daemon=True
        )
        process.start()
        self._process = process
        # Only the process may hold its end, or its death would not close the pipe.
        theirs.close()
        try:
            if self._connection.poll(_START_LIMIT_S) and self._connection.recv():
                return self._connection
        except (EOFError, OSError):
            pass
        self.stop()
        return None
