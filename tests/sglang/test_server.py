"""A server that is started here: who may call it, what it gives away, how it fails and ends."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import httpx
import pytest

from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.sglang.engine import RunningServer
from megatron_gmc.rollout.sglang.server import SglangServer
from tests.rollout.embedded import wait_until_gone
from tests.sglang.servers import (
    need_sglang,
    new_engine,
    new_server,
    samples_of,
    worst_error,
)

pytestmark = pytest.mark.anyio
Running = tuple[SglangServer, str]

SAMPLING = [("POST", "/generate"), ("GET", "/model_info"), ("GET", "/server_info")]
CONTROL = [
    ("POST", path)
    for path in (
        "/update_weights_from_disk",
        "/begin_weight_update",
        "/end_weight_update",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/update_weights_from_distributed",
        "/update_weights_from_tensor",
        "/update_weight_version",
        "/pause_generation",
        "/continue_generation",
        "/abort_request",
        "/flush_cache",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/weights_checker",
        "/get_weights_by_name",
    )
]


async def test_each_key_guards_its_paths(server: Running) -> None:
    """Without a key nothing but health answers; the sampling key opens no control call."""
    process, address = server
    keys = {"none": "", "api": process.keys.api, "admin": process.keys.admin, "wrong": "wrong"}
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        assert (await client.get("/health")).status_code == 200
        for paths, opening in ((SAMPLING, "api"), (CONTROL, "admin")):
            for method, path in paths:
                for name, key in keys.items():
                    headers = {"Authorization": f"Bearer {key}"} if key else {}
                    if name != opening:
                        answer = await client.request(method, path, json={}, headers=headers)
                        assert answer.status_code == 401, (path, name)


async def test_the_server_tells_its_keys_to_whoever_may_sample(server: Running) -> None:
    """SGLang 0.5.23's /server_info holds both keys, so they are one level of trust; once this
    fails, docs/engines.md may say otherwise."""
    process, address = server
    headers = {"Authorization": f"Bearer {process.keys.api}"}
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=60) as client:
        told = (await client.get("/server_info")).json()
    assert (told["api_key"], told["admin_api_key"]) == (process.keys.api, process.keys.admin)


async def test_keys_are_in_no_process_list_and_no_log(server: Running) -> None:
    process, _ = server
    assert process.process.pid is not None
    for key in (process.keys.api, process.keys.admin):
        for entry in ("cmdline", "environ"):
            content = Path(f"/proc/{process.process.pid}/{entry}").read_bytes()
            assert content and key.encode() not in content
        assert key not in process._plan.log.read_text()
        assert key not in repr(process.keys)


async def test_it_listens_on_loopback_alone(server: Running) -> None:
    _, address = server
    port = int(address.rsplit(":", 1)[1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "rope_theta", "architectures"])
async def test_a_server_of_another_model_is_refused(
    server: Running, folder: Path, tmp_path: Path, key: str
) -> None:
    process, address = server
    shutil.copytree(folder, tmp_path / "policy")
    path = tmp_path / "policy" / "config.json"
    config = json.loads(path.read_text())
    config[key] = ["LlamaForCausalLM"] if key == "architectures" else 48
    path.write_text(json.dumps(config))
    engine = new_engine(RunningServer(address, process.keys), tmp_path / "policy")
    with pytest.raises(EngineError, match=r"sglang-0 serves .*start it with the policy's folder"):
        await engine.start()


async def test_engines_of_a_version_must_agree_on_a_probe(
    server: Running, folder: Path, other_folder: Path
) -> None:
    """Two engines that claim one version with different weights: the second is refused."""
    process, address = server
    first = new_engine(RunningServer(address, process.keys), folder, name="first")
    second = new_engine(RunningServer(address, process.keys), folder, name="second")
    second._probes = first._probes
    for engine in (first, second):
        await engine.start()
    await first.update_weights(folder, 31)
    with pytest.raises(EngineError, match=r"second scores a probe .* apart from first"):
        await second.update_weights(other_folder, 31)
    with pytest.raises(EngineError, match="second holds no whole version"):
        await samples_of(second)
    for engine in (first, second):
        await engine.close()


async def test_memory_goes_to_the_learner_and_comes_back_with_the_weights(
    server: Running, folder: Path, other_folder: Path
) -> None:
    """The order of a colocated engine: release, learn, take weights' memory back, weights, cache;
    on a CPU the server frees nothing, and answers the same calls."""
    process, address = server
    engine = new_engine(RunningServer(address, process.keys), folder)
    await engine.start()
    await engine.update_weights(folder, 41)
    await engine.release_memory()
    await engine.update_weights(other_folder, 42)
    assert worst_error(other_folder, await samples_of(engine)) <= 1e-5
    await engine.close()


async def test_a_server_that_cannot_start_says_why(folder: Path, tmp_path: Path) -> None:
    need_sglang()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        server = new_server(folder, tmp_path / "taken.log", port=port)
        with pytest.raises(EngineError, match=r"sglang-0 .process \d+. ended with exit code"):
            await server.start()
    absent = new_server(folder, tmp_path / "absent.log", python=tmp_path / "python")
    with pytest.raises(EngineError, match="make sglang-cpu"):
        await absent.start()
    slow = new_server(folder, tmp_path / "slow.log", start_timeout_s=0.5)
    with pytest.raises(EngineError, match=r"sglang-0 was not ready within 0\.5 s"):
        await slow.start()
    assert slow.process.pid is not None
    wait_until_gone(slow.process.pid)
