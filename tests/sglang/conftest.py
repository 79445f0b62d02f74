"""One real server for the tests that only talk to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from megatron_gmc.rollout.sglang.server import SglangServer
from tests.rollout.models import save_tiny_model
from tests.sglang.servers import need_sglang, new_server


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture(scope="session")
async def server(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[tuple[SglangServer, str]]:
    """A running server and its address; nobody kills it."""
    need_sglang()
    server = new_server(folder, tmp_path_factory.mktemp("server") / "server.log")
    address = await server.start()
    yield server, address
    await server.close()
