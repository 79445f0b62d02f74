"""Builds the rollout engines that a config asks for."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from megatron_gmc.config import Config
from megatron_gmc.convert.hf_config import ModelShape
from megatron_gmc.convert.hugging_face import stream_tensors
from megatron_gmc.engine_config import SglangConfig
from megatron_gmc.errors import ConfigError
from megatron_gmc.rollout.embedded.engine import EmbeddedEngine
from megatron_gmc.rollout.engine import Engine
from megatron_gmc.rollout.fleet import FleetPolicy
from megatron_gmc.rollout.sglang.engine import InFlight, RunningServer, SglangEngine, WeightPlan
from megatron_gmc.rollout.sglang.probe import Probes
from megatron_gmc.rollout.sglang.server import LOOPBACK, Keys, ServerPlan, SglangServer
from megatron_gmc.rollout.sglang.transports import TransportName
from megatron_gmc.run_folder import RunFolder


@dataclass(frozen=True)
class Engines:
    """Engines and how the driver uses them; see RolloutDriver for the last three.

    `choice` says what was chosen where the config left it open, and why; empty where nothing was.
    """

    engines: Sequence[Engine]
    choice: str
    request_groups: int | None
    calls_per_engine: int
    fleet: FleetPolicy | None


def build_engines(config: Config, shape: ModelShape, folder: RunFolder) -> Engines:
    """The engines of a run, none of them started. Raises ConfigError for a missing key."""
    rollout = config.rollout
    if rollout.sglang is None:
        # The embedded engine works calls off one by one, so that more than one would let newer
        # weights wait behind them.
        return Engines([_embedded(config, shape, folder)], "", None, 1, None)
    plan, choice = _weight_plan(config, rollout.sglang)
    probes = Probes()
    engines = [
        SglangEngine(
            name,
            server,
            config.policy.path,
            vocabulary=shape.vocab_size,
            context=shape.max_positions,
            sample_timeout_s=rollout.request_timeout_s,
            weights=plan,
            probes=probes,
        )
        for name, server in _servers(config, rollout.sglang, folder)
    ]
    fleet = FleetPolicy(
        attempts=rollout.fleet.attempts,
        pause_s=rollout.fleet.pause_s,
        all_down_timeout_s=rollout.fleet.all_down_timeout_s,
    )
    # One group a call: faster than one sample a call, and its samples share the prompt's cache.
    return Engines(engines, choice, 1, rollout.sglang.calls_per_server, fleet)


def _embedded(config: Config, shape: ModelShape, folder: RunFolder) -> EmbeddedEngine:
    return EmbeddedEngine(
        "embedded engine",
        config.policy.path,
        version=0,
        vocabulary=shape.vocab_size,
        log=folder.path / "engine.log",
        start_timeout_s=config.rollout.start_timeout_s,
        sample_timeout_s=config.rollout.request_timeout_s,
    )


def _servers(
    config: Config, sglang: SglangConfig, folder: RunFolder
) -> list[tuple[str, SglangServer | RunningServer]]:
    if sglang.addresses:
        keys = keys_of(sglang)
        return [(f"SGLang at {one}", RunningServer(one, keys)) for one in sglang.addresses]
    started: list[tuple[str, SglangServer | RunningServer]] = []
    for number in range(sglang.servers or 0):
        plan = server_plan(config, sglang, folder.path / f"sglang_{number}.log")
        name = f"SGLang server {number}"
        started.append((name, SglangServer(name, plan)))
    return started


def server_plan(
    config: Config,
    sglang: SglangConfig,
    log: Path,
    *,
    host: str = LOOPBACK,
    port: int | None = None,
) -> ServerPlan:
    """How a server of the config's policy is started; see ServerPlan."""
    return ServerPlan(
        python=sglang.python,
        folder=config.policy.path,
        log=log,
        start_timeout_s=config.rollout.start_timeout_s,
        options=sglang.options,
        host=host,
        port=port,
        tensor=sglang.tensor,
        cpu=sglang.device == "cpu",
    )


def keys_of(sglang: SglangConfig) -> Keys:
    """The keys that the environment holds; raises ConfigError where it lacks one."""
    return Keys(
        api=_from_environment("api_key_variable", sglang.api_key_variable),
        admin=_from_environment("admin_api_key_variable", sglang.admin_api_key_variable),
    )


def _from_environment(field: str, variable: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        raise ConfigError(
            f"rollout.sglang.{field}: the environment has no {variable}; put there the key that "
            "the servers were started with"
        )
    return value


def _weight_plan(config: Config, sglang: SglangConfig) -> tuple[WeightPlan, str]:
    """The plan, and what was chosen of it in words."""
    weights, chosen = config.weights, []
    transport: TransportName
    if weights.transport != "auto":
        transport = weights.transport
    elif all(_is_here(address) for address in sglang.addresses):
        transport = "disk"
        chosen.append("weights.transport disk: every engine runs on this host and sees the folder")
    else:
        transport = "distributed"
        chosen.append("weights.transport distributed: an engine runs on another host")
    exact = config.rollout.lag.exact is not None
    in_flight: InFlight = weights.in_flight or ("wait" if exact else "pause_in_place")
    if weights.in_flight is None:
        kind = "exact" if exact else "bounded"
        chosen.append(f"weights.in_flight {in_flight}: the lag is {kind}")
    plan = WeightPlan(
        transport=transport,
        in_flight=in_flight,
        bucket_bytes=weights.bucket_mb * 10**6,
        timeout_s=weights.timeout_s,
        read=stream_tensors,
    )
    return plan, "; ".join(chosen)


def _is_here(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", socket.gethostname())
