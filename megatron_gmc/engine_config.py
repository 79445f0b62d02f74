"""The sections of a config that say where engines run and how weights come to them."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from megatron_gmc.rollout.sglang.server import RESERVED_OPTIONS
from megatron_gmc.section import PositiveFloat, Section

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
_OPTION = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class SglangConfig(Section):
    """SGLang servers: a number of them to start on this machine, or those at `addresses`."""

    servers: PositiveInt | None = None
    """How many to start here, each on a loopback port of its own."""
    addresses: tuple[str, ...] = ()
    """Servers that run already, as http://host:port."""
    python: Path = Path(".venv-sglang/bin/python")
    """With servers: the interpreter that has SGLang (`make sglang-cpu` installs one)."""
    device: Literal["cpu", "cuda"] = "cpu"
    """With servers: what they run on."""
    tensor: PositiveInt = 1
    """With servers: tensor parallel size of each."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """With servers: more options of SGLang, without the dashes: {mem-fraction-static: 0.7}."""
    api_key_variable: str = "SGLANG_API_KEY"
    """With addresses: the environment variable that holds their --api-key."""
    admin_api_key_variable: str = "SGLANG_ADMIN_API_KEY"
    """With addresses: the environment variable that holds their --admin-api-key."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """colocated: one server shares the learner's device, and the two take turns with its memory."""
    calls_per_server: PositiveInt = 64
    """Groups that a server is given at a time; the rest waits here."""

    @field_validator("addresses")
    @classmethod
    def _are_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            check_address(address)
        return addresses

    @field_validator("options")
    @classmethod
    def _are_options(cls, options: dict[str, object]) -> dict[str, object]:
        for name in options:
            if not _OPTION.fullmatch(name):
                raise ValueError(f"{name!r} is no option; write it as in mem-fraction-static")
            if name in RESERVED_OPTIONS:
                raise ValueError(f"{name} is set by this program; remove it")
        return options

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.servers is None) == (not self.addresses):
            raise ValueError(
                "give one of servers or addresses, as in 'sglang: {servers: 2}'; got "
                f"servers={self.servers}, addresses={list(self.addresses)}"
            )
        if len(set(self.addresses)) < len(self.addresses):
            raise ValueError(f"addresses: one is given twice in {list(self.addresses)}")
        if self.placement == "colocated" and self.servers != 1:
            raise ValueError(f"placement: colocated needs servers: 1, got {self.servers}")
        return self


def check_address(address: str) -> None:
    """Raise ValueError for what is not http://host:port, nothing before or behind it."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if not port or address != f"http://{host}:{port}" or not _is_host(host):
        raise ValueError(f"{address!r} is no address of the form http://host:port")


def _is_host(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return _HOST_NAME.fullmatch(host) is not None and not host.replace(".", "").isdigit()
    return True


class FleetConfig(Section):
    """What becomes of engines that fail; their work goes to others meanwhile."""

    attempts: NonNegativeInt = 5
    """How often in a row an engine is brought back before it is left out for good."""
    pause_s: PositiveFloat = 1.0
    """Before the first attempt; it doubles with each, up to a minute."""
    all_down_timeout_s: PositiveFloat = 600.0
    """How long no engine at all may be in service before the run ends."""


class WeightsConfig(Section):
    """How new weights come to SGLang engines."""

    transport: Literal["auto", "disk", "distributed", "tensor"] = "auto"
    """disk: engines read a folder; distributed: broadcast over a process group; tensor: shared
    memory of one host; auto: disk where all engines run on this host, distributed elsewhere."""
    in_flight: Literal["wait", "pause_in_place", "retract", "abort"] | None = None
    """Responses under way: let them end, keep them with or without their cache, or drop them.
    Default: wait with an exact lag, pause_in_place with a bounded one."""
    bucket_mb: PositiveInt = Field(default=256, le=65536)
    """With distributed and tensor: megabytes that travel at a time."""
    timeout_s: PositiveFloat = 600.0
    """Of one call of an update."""
