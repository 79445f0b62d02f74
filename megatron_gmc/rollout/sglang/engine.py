"""A SGLang server as the driver sees it: sampling, weights, memory; started here or elsewhere."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.http_engine import HttpEngine
from megatron_gmc.rollout.sglang.identity import ServerInfo, check_server
from megatron_gmc.rollout.sglang.probe import Probes, score
from megatron_gmc.rollout.sglang.server import Keys, SglangServer
from megatron_gmc.rollout.sglang.transports import (
    DiskTransport,
    DistributedTransport,
    ReadTensors,
    TensorTransport,
    Transport,
    TransportName,
)
from megatron_gmc.rollout.types import Refusal, Sample, SampleRequest, SamplingParams

InFlight = Literal["wait", "pause_in_place", "retract", "abort"]
"""What becomes of running responses when weights change; see docs/engines.md."""

_PAUSE_MODES = {"pause_in_place": "in_place", "retract": "retract", "abort": "abort"}
_MEMORY_TAGS = ("weights", "kv_cache")


@dataclass(frozen=True)
class RunningServer:
    """A server that somebody else started, at `address` (http://host:port)."""

    address: str
    keys: Keys


@dataclass(frozen=True)
class WeightPlan:
    """How weights come to an engine; `bucket_bytes` and `read` as in `transports`."""

    transport: TransportName
    in_flight: InFlight
    bucket_bytes: int
    timeout_s: float
    read: ReadTensors


class SglangEngine:
    """One server of the policy in `folder`, a Hugging Face folder.

    `vocabulary` and `context` are the policy's. `start` may be called again after `close`: it
    starts a new process, or connects anew. A sampling call fails after `sample_timeout_s`.
    """

    def __init__(
        self,
        name: str,
        server: SglangServer | RunningServer,
        folder: Path,
        *,
        vocabulary: int,
        context: int,
        sample_timeout_s: float,
        weights: WeightPlan,
        probes: Probes,
    ) -> None:
        self._name = name
        self._server = server
        self._folder = folder
        self._vocabulary = vocabulary
        self._context = context
        self._sample_timeout_s = sample_timeout_s
        self._weights = weights
        self._probes = probes
        self._http: HttpEngine | None = None
        self._transport: Transport | None = None
        self._running = 0
        self._changed = asyncio.Event()
        self._open = asyncio.Event()
        self._fault: str | None = None
        self._released = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def http(self) -> HttpEngine:
        """The client of the running server."""
        if self._http is None:
            raise EngineError(f"{self._name} was not started")
        return self._http

    async def start(self) -> None:
        """Start or reach the server, and check that it serves the policy's model."""
        await self.close()
        ready = False
        try:
            if isinstance(self._server, SglangServer):
                address = await self._server.start()
            else:
                address = self._server.address
            self._http = HttpEngine(
                self._name,
                address,
                self._server.keys.api,
                vocabulary=self._vocabulary,
                context=self._context,
                sample_timeout_s=self._sample_timeout_s,
                admin_token=self._server.keys.admin,
            )
            async with self._death_explained():
                await self._http.start()
                info = await check_server(self._http.session, self._folder)
            self._transport = self._build_transport(info)
            self._fault = None
            self._open.set()
            ready = True
        finally:
            if not ready:
                await self.close()

    async def version(self) -> int:
        async with self._death_explained():
            return await self.http.version()

    async def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> list[list[Sample | Refusal]]:
        http = self.http
        await self._open.wait()
        if self._fault is not None:
            raise EngineError(self._fault)
        self._running += 1
        try:
            async with self._death_explained():
                return await http.sample(requests, params)
        finally:
            self._running -= 1
            self._changed.set()

    async def update_weights(self, folder: Path, version: int) -> None:
        """See `Engine.update_weights`. After a failure nothing is sampled until one succeeds."""
        http, transport = self.http, self._transport
        assert transport is not None
        self._fault = None
        try:
            async with self._death_explained(), self._responses_held():
                await self._resume_memory("weights")
                async with http.publishing(version):
                    flush = self._weights.in_flight != "pause_in_place"
                    await transport.send(http.session, folder, version, flush=flush)
                await self._resume_memory("kv_cache")
                # a cache that could not be emptied is not found again under another key
                http.cache_key = f"{version}-{secrets.token_hex(4)}"
            async with self._death_explained():
                self._probes.check(version, self._name, await score(http.session))
        except BaseException as error:
            self._fault = f"{self._name} holds no whole version: {error or type(error).__name__}"
            raise
        finally:
            self._open.set()

    async def release_memory(self) -> None:
        """Give the device's memory to the learner; the next weights take it back."""
        await self._memory("/release_memory_occupation", list(_MEMORY_TAGS))
        self._released = True

    async def _resume_memory(self, tag: str) -> None:
        """Take back what `release_memory` gave, as far as `tag` goes; weights come first."""
        if self._released:
            await self._memory("/resume_memory_occupation", [tag])
            self._released = tag != _MEMORY_TAGS[-1]

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
        self._http = self._transport = None
        if isinstance(self._server, SglangServer):
            await self._server.close()

    def _build_transport(self, info: ServerInfo) -> Transport:
        plan = self._weights
        if plan.transport == "disk":
            return DiskTransport(plan.timeout_s)
        kind = DistributedTransport if plan.transport == "distributed" else TensorTransport
        return kind(plan.read, info.tp_size, plan.bucket_bytes, plan.timeout_s)

    @asynccontextmanager
    async def _responses_held(self) -> AsyncIterator[None]:
        """Let running responses end (wait), or hold them in the server and continue them after."""
        self._open.clear()  # what comes now waits here, and is computed by the new weights alone
        mode = _PAUSE_MODES.get(self._weights.in_flight)
        if mode is None:
            while self._running:
                self._changed.clear()
                await self._changed.wait()
            yield
            return
        await self._control("/pause_generation", {"mode": mode})
        yield
        await self._control("/continue_generation", {})

    async def _memory(self, path: str, tags: list[str]) -> None:
        await self._control(path, {"tags": tags})

    async def _control(self, path: str, body: dict[str, object]) -> None:
        session = self.http.session
        await session.send("POST", path, self._weights.timeout_s, body, admin=True)

    @asynccontextmanager
    async def _death_explained(self) -> AsyncIterator[None]:
        if isinstance(self._server, SglangServer):
            async with self._server.process.death_explained():
                yield
        else:
            yield
