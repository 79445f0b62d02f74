"""Starts the embedded engine's process, keeps it, and talks to it as any HTTP engine."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import megatron_gmc
from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.engine_process import EngineProcess
from megatron_gmc.rollout.http_engine import HttpEngine
from megatron_gmc.rollout.types import Refusal, Sample, SampleRequest, SamplingParams


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
        self._process = EngineProcess(name, log)
        self._http: HttpEngine | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int | None:
        """Id of the engine's process, None before `start`."""
        return self._process.pid

    async def start(self) -> None:
        assert self._process.pid is None, "started twice"
        ready = False
        try:
            async with asyncio.timeout(self._start_timeout_s), self._process.death_explained():
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
        async with self._process.death_explained():
            return await self._started().version()

    async def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> list[list[Sample | Refusal]]:
        async with self._process.death_explained():
            return await self._started().sample(requests, params)

    async def update_weights(self, folder: Path, version: int) -> None:
        async with self._process.death_explained():
            await self._started().update_weights(folder, version)

    async def release_memory(self) -> None:
        """It has no device of its own to give."""

    async def close(self) -> None:
        """End the process, by force if it does not end on SIGTERM; may be called again."""
        if self._http is not None:
            await self._http.close()
        await self._process.close()

    async def _launch(self) -> int:
        """Start the process and return the port that it listens on."""
        command = [sys.executable, "-m", "megatron_gmc.rollout.embedded"]
        options = [str(self._folder.resolve()), "--version", str(self._version)]
        await self._process.launch([*command, *options], _environment(), self._token, reports=True)
        return int(json.loads(await self._process.read_line())["port"])

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
