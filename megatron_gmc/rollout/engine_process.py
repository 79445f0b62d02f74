"""A process of this machine that an engine runs in: started, explained when it dies, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.http_session import ConnectionLostError

LOG_LINES = 5  # of the engine's log that an error quotes
DEATH_S = 2.0  # how long a process may take to be seen dead after its connection broke
CLOSE_S = 5.0  # how long it may take to end once its standard input is closed


class EngineProcess:
    """The process of the engine `name`; what it writes to standard error is appended to `log`.

    It leads a process group of its own, so that Ctrl-C is the driver's to handle and so that its
    own children end with it.
    """

    def __init__(self, name: str, log: Path) -> None:
        self._name = name
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process, None before `launch`."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._process else None

    async def launch(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        first_line: str,
        *,
        reports: bool,
    ) -> None:
        """Start it and write `first_line`, a secret perhaps, to its standard input.

        Standard input stays open: the process may take its closing for the end of its parent. Its
        standard output is for `read_line` where it `reports`, and goes to the log otherwise.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if reports else log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died at once; whoever waits is told
            self._process.stdin.write(first_line.encode() + b"\n")
            await self._process.stdin.drain()

    async def read_line(self) -> bytes:
        """The next line of its standard output; raises EngineError where it has ended instead."""
        process = self._process
        assert process is not None and process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            await process.wait()
            raise EngineError(self.ending())
        return line

    async def wait(self) -> None:
        """Return once it has ended."""
        assert self._process is not None
        await self._process.wait()

    async def close(self) -> None:
        """End it by closing its standard input, by force where it stays; may be repeated."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        if process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), CLOSE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    @contextlib.asynccontextmanager
    async def death_explained(self) -> AsyncIterator[None]:
        """Where a connection broke because the process has died, say so, and what it said last."""
        try:
            yield
        except ConnectionLostError as error:
            process = self._process
            if process is None:
                raise
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), DEATH_S)
            if process.returncode is None:
                raise
            raise EngineError(self.ending()) from error

    def ending(self) -> str:
        """How the process ended, with the end of its log."""
        process = self._process
        assert process is not None and process.returncode is not None
        code = process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        with self._log.open(encoding="utf-8", errors="replace") as log:
            last = " | ".join(line.strip() for line in deque(log, maxlen=LOG_LINES))
        return (
            f"{self._name} (process {process.pid}) {how}; its log {self._log} ends: "
            f"{last or '(nothing was written)'}"
        )
