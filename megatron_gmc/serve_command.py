"""`serve`: one SGLang server of a run, in the foreground, on a machine of its own."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from megatron_gmc.config import Config
from megatron_gmc.engines import keys_of, server_plan
from megatron_gmc.errors import ConfigError
from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.sglang.server import SglangServer
from megatron_gmc.run_folder import write_atomically
from megatron_gmc.settings import load_config


def serve(
    path: Path,
    overrides: Sequence[str],
    *,
    host: str | None,
    port: int | None,
    log: Path,
    address_file: Path | None,
) -> int:
    """Serve the config's policy until SIGTERM; returns the exit code.

    `host` None is this machine's name, `port` None a free one; `address_file` then says where the
    server is, once it serves.

    The keys come from the environment variables that the config names, so that the run, which
    reaches this server by `rollout.sglang.addresses`, has the same. Raises ConfigError for a faulty
    config or a missing key, EngineError where the server ends by itself.
    """
    config = load_config(Config, path, overrides)
    sglang = config.rollout.sglang
    if sglang is None:
        raise ConfigError("rollout.sglang: this command needs it, and an engine sglang")
    plan = server_plan(config, sglang, log, host=host or socket.gethostname(), port=port)
    server = SglangServer(f"SGLang server on {plan.host}", plan, keys_of(sglang))
    return asyncio.run(_serve(server, address_file))


async def _serve(server: SglangServer, address_file: Path | None) -> int:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        address = await server.start()
        print(f"serving at {address}", flush=True)
        if address_file is not None:
            write_atomically(address_file, address + "\n")
        waiting = asyncio.create_task(ended.wait())
        dying = asyncio.create_task(server.process.wait())
        await asyncio.wait({waiting, dying}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.is_set():
            raise EngineError(server.process.ending())
    finally:
        await server.close()
    return 0
