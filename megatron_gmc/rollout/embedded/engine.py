"""Starts the embedded engine's process, keeps it, and talks to it as any HTTP engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import megatron_gmc
from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.http_engine import ConnectionLostError, HttpEngine
from megatron_gmc.rollout.types import Refusal, Sample, SampleRequest, SamplingParams

LOG_LINES = 5  # of the engine's log that an error quotes
DEATH_S = 2.0  # how long a process may take to be seen dead after its connection broke
CLOSE_S = 5.0  # how long it may take to end on SIGTERM


class EmbeddedEngine:
    """An engine in a process of its own on this machine, on a loopback port of its choice.

    `folder` is the Hugging Face folder that it starts from, as `version`; `vocabulary` the
    policy's. Its standard error is appended to the file `log`. `start` fails after
    `start_timeout_s` seconds and a sampling call after `sample_timeout_s`.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        version: int,
        vocabulary: int,
        log: Path,
        start_timeout_s: float,
        sample_timeout_s: float,
    ) -> None:
        self._name = name
        self._folder = folder
        self._version = version
        self._vocabulary = vocabulary
        self._log = log
        self._start_timeout_s = start_timeout_s
        self._sample_timeout_s = sample_timeout_s
        self._token = secrets.token_urlsafe(32)
        self._process: asyncio.subprocess.Process | None = None
        self._http: HttpEngine | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int | None:
        """Id of the engine's process, None before `start`."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        assert self._process is None, "started twice"
        ready = False
        try:
            async with asyncio.timeout(self._start_timeout_s), self._death_explained():
                await self._connect(await self._launch())
            ready = True
        except TimeoutError as error:
            raise EngineError(
                f"{self._name} was not ready within {self._start_timeout_s:g} s; its log is "
                f"{self._log}"
            ) from error
        finally:
            if not ready:
                await self.close()

    async def version(self) -> int:
        async with self._death_explained():
            return await self._started().version()

    async def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> list[list[Sample | Refusal]]:
        async with self._death_explained():
            return await self._started().sample(requests, params)

    async def update_weights(self, folder: Path, version: int) -> None:
        async with self._death_explained():
            await self._started().update_weights(folder, version)

    async def close(self) -> None:
        """End the process, by force if it does not end on SIGTERM; may be called again."""
        if self._http is not None:
            await self._http.close()
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), CLOSE_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.stdin is not None:
            process.stdin.close()

    async def _launch(self) -> int:
        """Start the process and return the port that it listens on."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "megatron_gmc.rollout.embedded",
                str(self._folder.resolve()),
                "--version",
                str(self._version),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is the driver's to handle
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(ConnectionError):  # it died at once; told below
            stdin.write(self._token.encode() + b"\n")
            await stdin.drain()
        line = await stdout.readline()
        if not line:
            await self._process.wait()
            raise EngineError(self._ending(self._process))
        return int(json.loads(line)["port"])

    async def _connect(self, port: int) -> None:
        self._http = HttpEngine(
            self._name,
            f"http://127.0.0.1:{port}",
            self._token,
            vocabulary=self._vocabulary,
            sample_timeout_s=self._sample_timeout_s,
        )
        await self._http.start()

    def _started(self) -> HttpEngine:
        if self._http is None:
            raise EngineError(f"{self._name} was not started")
        return self._http

    @contextlib.asynccontextmanager
    async def _death_explained(self) -> AsyncIterator[None]:
        """Where the process has died, say so, and what it said last."""
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
            raise EngineError(self._ending(process)) from error

    def _ending(self, process: asyncio.subprocess.Process) -> str:
        code = process.returncode
        assert code is not None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        with self._log.open(encoding="utf-8", errors="replace") as log:
            last = " | ".join(line.strip() for line in deque(log, maxlen=LOG_LINES))
        return (
            f"{self._name} (process {process.pid}) {how}; its log {self._log} ends: "
            f"{last or '(nothing was written)'}"
        )


def _environment() -> dict[str, str]:
    """The engine's environment: one thread, no network, the package found from any folder."""
    package_root = str(Path(megatron_gmc.__file__).resolve().parent.parent)
    path = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }
