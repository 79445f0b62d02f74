"""A SGLang server that this program starts, watches and ends."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.engine_process import EngineProcess
from megatron_gmc.rollout.http_session import HttpSession

SERVE = Path(__file__).resolve().parent / "server_side" / "serve.py"
POLL_S = 0.2
HEALTH_TIMEOUT_S = 5.0

LOOPBACK = "127.0.0.1"

Option = bool | int | float | str

# What makes SGLang run on a CPU; sizes for small models. Each can be overridden.
CPU_OPTIONS: Mapping[str, Option] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "dtype": "float32",
    "mem-fraction-static": 0.2,
    "max-total-tokens": 65536,
    "max-running-requests": 64,
}
# Options that this module sets. SGLang prints its keys into its log at level info.
RESERVED_OPTIONS = (
    "model-path",
    "host",
    "port",
    "api-key",
    "admin-api-key",
    "weight-version",
    "tp-size",
    "log-level",
    "log-level-http",
)

# Of the learner's environment: its packages and its ranks are nothing to the server.
_NOT_PASSED_ON = (
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_NOT_PASSED_ON_PREFIX = "TORCHELASTIC_"


@dataclass(frozen=True)
class Keys:
    """The bearer tokens of a server: `api` for sampling, `admin` for weights and control."""

    api: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    admin: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)


@dataclass(frozen=True)
class ServerPlan:
    """How to start a server.

    `python` has SGLang installed. `folder` is the Hugging Face folder that it starts from, as
    version 0. `options` are SGLang's, without the dashes; True stands for a bare flag, False
    leaves it out. `host` is the address it listens at, `port` None takes a free one. `tensor` is
    its tensor parallel size.
    """

    python: Path
    folder: Path
    log: Path
    start_timeout_s: float
    options: Mapping[str, Option] = field(default_factory=dict)
    host: str = LOOPBACK
    port: int | None = None
    tensor: int = 1
    cpu: bool = False


class SglangServer:
    """The process of one server. `start` may be called again once `close` has ended it."""

    def __init__(self, name: str, plan: ServerPlan, keys: Keys | None = None) -> None:
        self.keys = keys or Keys()
        self._name = name
        self._plan = plan
        self._process = EngineProcess(name, plan.log)

    @property
    def process(self) -> EngineProcess:
        return self._process

    async def start(self) -> str:
        """Start the process and return its address once it serves.

        Raises EngineError, with the end of its log, where it ends instead or takes longer than
        `start_timeout_s`.
        """
        port = self._plan.port or _free_port()
        self._process = EngineProcess(self._name, self._plan.log)
        keys = {"api_key": self.keys.api, "admin_api_key": self.keys.admin}
        try:
            await self._process.launch(
                command(self._plan, port),
                environment(self._plan, os.environ),
                json.dumps(keys),
                reports=False,
            )
            address = f"http://{self._plan.host}:{port}"
            async with asyncio.timeout(self._plan.start_timeout_s):
                await self._serves(address)
        except TimeoutError as error:
            await self.close()
            raise EngineError(
                f"{self._name} was not ready within {self._plan.start_timeout_s:g} s; its log is "
                f"{self._plan.log}"
            ) from error
        except FileNotFoundError as error:
            raise EngineError(
                f"{self._name}: there is no {self._plan.python}; install SGLang (make sglang-cpu) "
                "and name its interpreter in rollout.sglang.python"
            ) from error
        return address

    async def close(self) -> None:
        await self._process.close()

    async def _serves(self, address: str) -> None:
        session = HttpSession(self._name, address, self.keys.api)
        session.open()
        try:
            while True:
                if self._process.returncode is not None:
                    raise EngineError(self._process.ending())
                try:
                    await session.send("GET", "/health", HEALTH_TIMEOUT_S)
                except EngineError:
                    await asyncio.sleep(POLL_S)
                else:
                    break
        finally:
            await session.close()
        if self._process.returncode is not None:  # whoever answered was not this process
            raise EngineError(self._process.ending())


def command(plan: ServerPlan, port: int) -> list[str]:
    """The command line of a server; it holds no secret."""
    options: dict[str, Option] = {
        **(CPU_OPTIONS if plan.cpu else {}),
        **plan.options,
        "model-path": str(plan.folder.resolve()),
        "host": plan.host,
        "port": port,
        "weight-version": "0",
        "tp-size": plan.tensor,
        "skip-server-warmup": True,
        "log-level": "warning",
    }
    arguments = [str(plan.python), str(SERVE)]
    for name, value in options.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is not False:
            arguments += [f"--{name}", str(value)]
    return arguments


def environment(plan: ServerPlan, base: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: without the learner's packages and ranks, without a network."""
    kept = {
        name: value
        for name, value in base.items()
        if name not in _NOT_PASSED_ON and not name.startswith(_NOT_PASSED_ON_PREFIX)
    }
    kept["HF_HUB_OFFLINE"] = "1"
    if plan.cpu:
        kept |= {
            "MEGATRON_GMC_SGLANG_CPU": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        if plan.host == LOOPBACK:
            # Its ranks, and the weights' group, stay on this machine.
            kept["GLOO_SOCKET_IFNAME"] = "lo"
    return kept


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
