"""Three ways to bring the weights of a version to one engine.

`disk`: the engine reads the folder itself; any file system that both see. `distributed`: this
process broadcasts over a process group that the engine has joined; any network. `tensor`: the
engine maps this process's shared memory; the same host. The latter two read the folder here, one
bucket at a time. Each call ends with the engine holding the whole version, or raises EngineError
and leaves it with a mixture.
"""

from __future__ import annotations

import asyncio
import base64
import io
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import urlsplit

from torch import Tensor

from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.http_engine import UPDATE_ANSWER
from megatron_gmc.rollout.http_session import HttpSession
from megatron_gmc.rollout.sampling import in_daemon_thread
from megatron_gmc.rollout.sglang.buckets import Bucket, buckets, shared_by_name
from megatron_gmc.rollout.sglang.group import SendingGroup

TransportName = Literal["disk", "distributed", "tensor"]
ReadTensors = Callable[[Path], Iterator[tuple[str, Tensor]]]
"""Names and tensors of a Hugging Face folder, one at a time."""


class Transport(Protocol):
    """Sends to one engine. `flush` empties the cache of prompts that older weights computed."""

    async def send(
        self, session: HttpSession, folder: Path, version: int, *, flush: bool
    ) -> None: ...


class DiskTransport:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def send(self, session: HttpSession, folder: Path, version: int, *, flush: bool) -> None:
        body = {
            "model_path": str(folder.absolute()),
            "weight_version": str(version),
            "flush_cache": flush,
        }
        await call(session, "/update_weights_from_disk", body, self._timeout_s)


class DistributedTransport:
    """`tensor_ranks` of the engine join; the group is kept from one transfer to the next."""

    def __init__(
        self, read: ReadTensors, tensor_ranks: int, bucket_bytes: int, timeout_s: float
    ) -> None:
        self._read = read
        self._tensor_ranks = tensor_ranks
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._group: SendingGroup | None = None

    async def send(self, session: HttpSession, folder: Path, version: int, *, flush: bool) -> None:
        group = self._group or await self._join(session)
        self._group = None  # unless this transfer ends well, the next one needs another group
        async with _update_session(session, self._timeout_s):
            async for bucket in _prefetched(buckets(self._read(folder), self._bucket_bytes)):
                body = {
                    "names": bucket.names,
                    "dtypes": bucket.dtypes,
                    "shapes": bucket.shapes,
                    "group_name": group.name,
                    "load_format": "flattened_bucket",
                    **_stamp(bucket, version, flush),
                }
                await self._both(session, "/update_weights_from_distributed", body, group, bucket)
        self._group = group

    async def _join(self, session: HttpSession) -> SendingGroup:
        name = f"weights-{secrets.token_hex(8)}"
        address = _own_address(session.address)
        group = SendingGroup(name, 1 + self._tensor_ranks, address, self._timeout_s)
        body = {
            "master_address": address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.ranks,
            "group_name": name,
            "backend": group.backend,
        }
        asked = call(session, "/init_weights_update_group", body, self._timeout_s)
        await _all_or_error(asked, in_daemon_thread(group.join))
        return group

    async def _both(
        self,
        session: HttpSession,
        path: str,
        body: dict[str, object],
        group: SendingGroup,
        bucket: Bucket,
    ) -> None:
        asked = call(session, path, body, self._timeout_s)
        await _all_or_error(asked, in_daemon_thread(lambda: group.broadcast(bucket.flat)))


class TensorTransport:
    """`tensor_ranks` of the engine map the same shared memory; only handles travel over HTTP."""

    def __init__(
        self, read: ReadTensors, tensor_ranks: int, bucket_bytes: int, timeout_s: float
    ) -> None:
        self._read = read
        self._tensor_ranks = tensor_ranks
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s

    async def send(self, session: HttpSession, folder: Path, version: int, *, flush: bool) -> None:
        async with _update_session(session, self._timeout_s):
            async for bucket in _prefetched(buckets(self._read(folder), self._bucket_bytes)):
                tensors = bucket.tensors()
                body = {
                    "serialized_named_tensors": [
                        _handles(tensors) for _ in range(self._tensor_ranks)
                    ],
                    **_stamp(bucket, version, flush),
                }
                await call(session, "/update_weights_from_tensor", body, self._timeout_s)


async def call(session: HttpSession, path: str, body: object, timeout_s: float) -> None:
    """An admin call that answers with success and message; raises EngineError without success."""
    answer = await session.post(UPDATE_ANSWER, path, timeout_s, body, admin=True)
    if not answer.success:
        raise EngineError(f"{session.name} refused {path}: {answer.message}")


@asynccontextmanager
async def _update_session(session: HttpSession, timeout_s: float) -> AsyncIterator[None]:
    """SGLang takes tensors only between these two calls; a second begin is refused."""
    await call(session, "/begin_weight_update", {}, timeout_s)
    yield
    await call(session, "/end_weight_update", {}, timeout_s)


async def _prefetched(filled: Iterator[Bucket]) -> AsyncIterator[Bucket]:
    """Fill the next bucket, in a thread, while the caller sends the one that it was given."""

    def fill() -> Bucket | None:
        return next(filled, None)

    bucket = await in_daemon_thread(fill)
    while bucket is not None:
        following = asyncio.ensure_future(in_daemon_thread(fill))
        yield bucket
        bucket = await following


def _stamp(bucket: Bucket, version: int, flush: bool) -> dict[str, object]:
    """Only with the last bucket does the engine hold the version."""
    if not bucket.last:
        return {"flush_cache": False}
    return {"weight_version": str(version), "flush_cache": flush}


def _handles(tensors: list[tuple[str, Tensor]]) -> str:
    """SGLang's form: the pickle of handles on shared memory, which its reader checks by type."""
    written = io.BytesIO()
    with shared_by_name():
        ForkingPickler(written).dump(tensors)
    return base64.b64encode(written.getvalue()).decode()


async def _all_or_error(call_of_engine: Awaitable[None], own_part: Awaitable[None]) -> None:
    """Wait for both ends of a collective; where one fails, do not wait for the other."""
    tasks = [asyncio.ensure_future(call_of_engine), asyncio.ensure_future(own_part)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _own_address(engine: str) -> str:
    """The address of this host under which `engine` (http://host:port) reaches it."""
    parts = urlsplit(engine)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port))  # sends nothing
        return str(probe.getsockname()[0])
