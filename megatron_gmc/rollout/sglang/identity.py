"""Does a server serve the policy's model? Asked once, before anything is sampled from it."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import TypeAdapter

from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.http_engine import CONTROL_TIMEOUT_S
from megatron_gmc.rollout.http_session import HttpSession, Wire

# Of config.json: what says nothing about the function that the weights compute.
_INCIDENTAL = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "initializer_range")


class _ModelInfo(Wire):
    model_path: str
    architectures: list[str] | None


class ServerInfo(Wire):
    """Of `/server_info`, which holds the keys as well: nothing else of it is kept."""

    tp_size: int
    pp_size: int
    dp_size: int


_MODEL_INFO = TypeAdapter(_ModelInfo)
_SERVER_INFO = TypeAdapter(ServerInfo)


async def check_server(session: HttpSession, folder: Path) -> ServerInfo:
    """Compare architecture and, where this host sees the server's folder, the whole config.json.

    Raises EngineError for another model, and for a server of several data or pipeline ranks.
    """
    served = await session.get(_MODEL_INFO, "/model_info", CONTROL_TIMEOUT_S)
    own = _read_config(folder)
    if served.architectures != own.get("architectures"):
        raise EngineError(
            f"{session.name} serves {served.architectures}, the policy is "
            f"{own.get('architectures')}; start it with the policy's folder"
        )
    path = Path(served.model_path)
    if (path / "config.json").is_file():
        theirs = _read_config(path)
        for key in sorted(own.keys() | theirs.keys()):
            if key not in _INCIDENTAL and own.get(key) != theirs.get(key):
                raise EngineError(
                    f"{session.name} serves {path}, whose {key} is {theirs.get(key)!r}; the "
                    f"policy's is {own.get(key)!r}; start it with the policy's folder"
                )
    info = await session.get(_SERVER_INFO, "/server_info", CONTROL_TIMEOUT_S)
    if info.pp_size != 1 or info.dp_size != 1:
        raise EngineError(
            f"{session.name} has {info.dp_size} data and {info.pp_size} pipeline ranks; SGLang "
            "takes new weights with tensor ranks alone: start several servers instead"
        )
    return info


def _read_config(folder: Path) -> dict[str, object]:
    tree: dict[str, object] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return tree
