"""Signals that ask a run to stop: SIGTERM, and SIGUSR1, which SLURM can be told to send before.

The first one asks: the run ends the step under way, writes a checkpoint and exits with
EXIT_REQUEUE. A second one ends the process at once. Python runs its handlers only between two of
its own instructions, and a collective may keep it from there for long: so a thread reads the
signals' numbers from the wake-up descriptor, where the interpreter writes them at once.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_WARNING_S = 5.0
"""SLURM sends a warning to every process of a job step, and torchrun hands on what it gets: signals
that come within this time of the first are the same warning."""


class StopRequest:
    """Whether the run was asked to stop, by a signal to this process or by another rank's word."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._since = 0.0
        self.reason = ""

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def ask(self, reason: str) -> None:
        """Ask the run to stop, naming who does; only the first reason is kept."""
        if not self._asked.is_set():
            self._since = time.monotonic()
            self.reason = reason
            self._asked.set()

    @contextmanager
    def listening(self, rank: int) -> Iterator[None]:
        """Listen to SIGNALS; in the process's main thread alone, as Python wants it."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        handlers = {number: signal.signal(number, _nothing) for number in SIGNALS}
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=self._read, args=(ours, rank), daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            theirs.close()
            thread.join()
            ours.close()

    def _read(self, ours: socket.socket, rank: int) -> None:
        while numbers := ours.recv(64):
            for number in numbers:
                if number in SIGNALS:
                    self._take(signal.Signals(number), rank)

    def _take(self, number: signal.Signals, rank: int) -> None:
        if self.asked and time.monotonic() - self._since > SAME_WARNING_S:
            os.write(2, f"rank {rank}: a second signal, {number.name}: ends at once\n".encode())
            os._exit(128 + number)
        self.ask(f"{number.name} to rank {rank}")


def _nothing(number: int, frame: object) -> None:
    """A signal whose handler is Python's is written to the wake-up descriptor, and kills nobody."""
