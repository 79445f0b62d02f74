"""The embedded engine as its users meet it: samples, weights and refusals of a real process."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from megatron_gmc.rollout.embedded.engine import EmbeddedEngine
from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.types import SampleRequest, SamplingParams
from tests.rollout.embedded import (
    LONG,
    LONG_PARAMS,
    PARAMS,
    REQUESTS,
    client_of,
    new_engine,
    same_bits,
    samples_of,
    worst_log_prob_error,
)
from tests.rollout.models import CONTEXT, VOCABULARY, save_tiny_model

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture(scope="module")
async def engine(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[EmbeddedEngine]:
    """One process for the tests that only talk to it; each leaves it serving `folder` as 0."""
    engine = new_engine(folder, tmp_path_factory.mktemp("run") / "engine.log")
    await engine.start()
    yield engine
    await engine.close()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_log_probs_through_http_equal_the_oracle(
    engine: EmbeddedEngine, folder: Path, temperature: float
) -> None:
    """T1: at lag 0 every ratio is 1 within rounding, whatever the temperature."""
    params = SamplingParams(temperature, 12, (0, 7))
    results = await samples_of(engine, REQUESTS, params)
    assert [len(result) for result in results] == [4, 4, 4]
    assert worst_log_prob_error(folder, results, temperature, REQUESTS) <= 1e-5
    assert all(set(s.versions.tolist()) == {0} for result in results for s in result)


async def test_every_stop_token_stops(engine: EmbeddedEngine) -> None:
    """T5: finish reason stop for the second end-of-sequence id as for the first."""
    request = SampleRequest(group_id=0, prompt_tokens=(1, 2), count=60, seed=3)
    (samples,) = await samples_of(engine, [request])
    last = {sample.finish_reason: set[int]() for sample in samples}
    for sample in samples:
        last[sample.finish_reason].add(int(sample.tokens[-1]))
    assert last["stop"] == {0, 7}
    assert not last["length"] & {0, 7}


async def test_requests_of_different_counts_come_back_in_their_order(
    engine: EmbeddedEngine, folder: Path
) -> None:
    requests = [
        SampleRequest(0, (1, 2), 3, 50),
        SampleRequest(1, (4,), 1, 51),
        SampleRequest(2, (5, 6, 7), 3, 52),
        SampleRequest(3, (2,), 1, 53),
    ]
    results = await samples_of(engine, requests)
    assert [len(result) for result in results] == [3, 1, 3, 1]
    assert worst_log_prob_error(folder, results, 1.0, requests) <= 1e-5


async def test_two_processes_give_the_same_bits(
    engine: EmbeddedEngine, folder: Path, tmp_path: Path
) -> None:
    first = await samples_of(engine, REQUESTS)
    assert same_bits(first, await samples_of(engine, REQUESTS))
    second_engine = new_engine(folder, tmp_path / "engine.log")
    await second_engine.start()
    try:
        assert same_bits(first, await samples_of(second_engine, REQUESTS))
    finally:
        await second_engine.close()
    reseeded = [SampleRequest(r.group_id, r.prompt_tokens, r.count, r.seed + 50) for r in REQUESTS]
    assert not same_bits(first, await samples_of(engine, reseeded))


async def test_new_weights_come_with_their_version(
    engine: EmbeddedEngine, folder: Path, other_folder: Path
) -> None:
    old = await samples_of(engine, REQUESTS)
    await engine.update_weights(other_folder, 7)
    assert await engine.version() == 7
    new = await samples_of(engine, REQUESTS)
    assert all(set(s.versions.tolist()) == {7} for result in new for s in result)
    assert worst_log_prob_error(other_folder, new, 1.0, REQUESTS) <= 1e-5
    await engine.update_weights(folder, 0)
    assert same_bits(old, await samples_of(engine, REQUESTS))


async def test_a_version_is_that_of_the_weights_that_sampled(
    engine: EmbeddedEngine, folder: Path, other_folder: Path
) -> None:
    """L5: an update in the middle of queued requests; each is sampled wholly by what it says."""
    before = [asyncio.create_task(samples_of(engine, REQUESTS)) for _ in range(5)]
    update = asyncio.create_task(engine.update_weights(other_folder, 8))
    after = [asyncio.create_task(samples_of(engine, REQUESTS)) for _ in range(5)]
    await update
    after.append(asyncio.create_task(samples_of(engine, REQUESTS)))
    for task in (*before, *after):
        results = await task
        (version,) = {int(v) for samples in results for s in samples for v in s.versions}
        source = {0: folder, 8: other_folder}[version]
        assert worst_log_prob_error(source, results, 1.0, REQUESTS) <= 1e-5
    assert version == 8  # what was asked for after the acknowledgement
    await engine.update_weights(folder, 0)


async def test_health_answers_while_the_model_is_busy(engine: EmbeddedEngine) -> None:
    sampling = asyncio.create_task(engine.sample(LONG, LONG_PARAMS))
    await asyncio.sleep(0.05)
    async with client_of(engine) as client:
        health = asyncio.create_task(client.get("/health"))
        done, _ = await asyncio.wait({sampling, health}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {health}
        assert (await health).status_code == 200
    await sampling


@pytest.mark.parametrize("wrong", ["missing", "unexpected", "shape", "folder"])
async def test_refused_weights_change_nothing(
    engine: EmbeddedEngine, other_folder: Path, tmp_path: Path, wrong: str
) -> None:
    """L6, the engine's part: the refusal is named, the old weights and version stay."""
    before = await samples_of(engine, REQUESTS)
    tensors = load_file(other_folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_norm.weight"
    if wrong == "missing":
        del tensors[name]
    elif wrong == "unexpected":
        name = "model.layers.0.self_attn.q_proj.bias"
        tensors[name] = tensors["model.norm.weight"].clone()
    elif wrong == "shape":
        tensors[name] = tensors[name][:-1].clone()
    if wrong == "folder":
        name = "model.safetensors"
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=f"embedded-0.*{name}"):
        await engine.update_weights(tmp_path, 9)
    assert await engine.version() == 0
    assert same_bits(before, await samples_of(engine, REQUESTS))


@pytest.mark.parametrize("token", ["", "wrong", "wröng"])
async def test_the_token_guards_everything_but_health(engine: EmbeddedEngine, token: str) -> None:
    headers = {b"Authorization": f"Bearer {token}".encode()} if token else {}
    assert engine._http is not None
    async with httpx.AsyncClient(base_url=engine._http.session.address, headers=headers) as client:
        assert (await client.get("/health")).status_code == 200
        for method, path in [
            ("GET", "/model_info"),
            ("POST", "/generate"),
            ("POST", "/update_weights_from_disk"),
            ("GET", "/anything"),
        ]:
            response = await client.request(method, path)
            assert response.status_code == 401
            assert "bearer token" in response.json()["error"]["message"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"input_ids": [[1], [2, VOCABULARY]]}, r"input_ids\[1\]: token id 24"),
    "negative id": ({"input_ids": [[-1]]}, r"input_ids\[0\]: token id -1"),
    "huge id": ({"input_ids": [[2**70]]}, "token id"),
    "empty prompt": ({"input_ids": [[]]}, r"input_ids\[0\] is empty"),
    "no prompt": ({"input_ids": []}, "input_ids"),
    "one prompt bare": ({"input_ids": [1, 2]}, r"input_ids\.0"),
    "text": ({"input_ids": [["a"]]}, r"input_ids\.0\.0"),
    "context": ({"input_ids": [[1] * (CONTEXT - 3)]}, "leaves room for 60"),
    "temperature 0": ({"sampling_params": {"temperature": 0.0}}, "temperature"),
    "temperature -1": ({"sampling_params": {"temperature": -1.0}}, "temperature"),
    "top_p": ({"sampling_params": {"top_p": 0.9}}, "top_p: .*must be 1"),
    "top_k": ({"sampling_params": {"top_k": 5}}, "top_k"),
    "no samples": ({"sampling_params": {"n": 0}}, r"\bn: "),
    "no tokens": ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    "stop id": ({"sampling_params": {"stop_token_ids": [99]}}, "stop_token_ids: token id 99"),
    "seed": ({"sampling_params": {"sampling_seed": -1}}, "sampling_seed"),
    "no log-probs": ({"return_logprob": False}, "return_logprob"),
    "unknown field": ({"stream": True}, "stream"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_request_is_refused_by_name_and_harms_nothing(
    engine: EmbeddedEngine, case: str
) -> None:
    changes, message = BAD[case]
    params = {"temperature": 1.0, "max_new_tokens": 4, "sampling_seed": 1}
    params |= changes.get("sampling_params", {})
    body = {"input_ids": [[1]], "return_logprob": True} | changes | {"sampling_params": params}
    async with client_of(engine) as client:
        response = await client.post("/generate", json=body)
        assert response.status_code == 400
        assert re.search(message, response.json()["error"]["message"])
        good = {"input_ids": [[1]], "return_logprob": True}
        good["sampling_params"] = {"temperature": 1, "max_new_tokens": 4, "sampling_seed": 1}
        assert (await client.post("/generate", json=good)).status_code == 200


async def test_sampling_params_of_each_prompt_may_differ_in_the_seed_alone(
    engine: EmbeddedEngine,
) -> None:
    one = {"temperature": 1.0, "max_new_tokens": 4, "sampling_seed": 1}
    body = {"input_ids": [[1], [2]], "return_logprob": True}
    async with client_of(engine) as client:
        for params, message in [
            ([one], "1 entries for 2 prompts"),
            ([one, one | {"temperature": 0.5}], "sampling_seed alone"),
        ]:
            response = await client.post("/generate", json=body | {"sampling_params": params})
            assert response.status_code == 400
            assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
async def test_a_body_that_is_not_json_is_refused(engine: EmbeddedEngine, content: bytes) -> None:
    async with client_of(engine) as client:
        for path in ("/generate", "/update_weights_from_disk"):
            assert (await client.post(path, content=content)).status_code == 400
    assert await engine.version() == 0


async def test_a_version_is_a_number(engine: EmbeddedEngine, folder: Path) -> None:
    async with client_of(engine) as client:
        for version in ("-1", "new", "1.5", "", 3, "9" * 30):
            body = {"model_path": str(folder), "weight_version": version}
            response = await client.post("/update_weights_from_disk", json=body)
            assert response.status_code == 400
    assert await engine.version() == 0


async def test_prompts_no_engine_can_serve_are_not_sent(engine: EmbeddedEngine) -> None:
    for prompt, count, message in [
        ((1, VOCABULARY), 1, "group 5: prompt token id 24 is outside the vocabulary of 24"),
        ((), 1, "group 5: the prompt has no token"),
        ((1,), 0, "group 5: count must be at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            await engine.sample([SampleRequest(5, prompt, count, 1)], PARAMS)


async def test_a_prompt_beyond_the_context_is_an_error_that_says_so(
    engine: EmbeddedEngine,
) -> None:
    with pytest.raises(EngineError, match="leaves room for 52"):
        await engine.sample([SampleRequest(0, (1,) * 53, 1, 1)], PARAMS)


async def test_the_token_is_in_no_process_list_and_no_log(engine: EmbeddedEngine) -> None:
    assert engine.pid is not None
    for entry in ("cmdline", "environ"):
        content = Path(f"/proc/{engine.pid}/{entry}").read_bytes()
        assert content
        assert engine._token.encode() not in content
    assert engine._token not in engine._log.read_text()


async def test_the_engine_listens_on_loopback_alone(engine: EmbeddedEngine) -> None:
    assert engine._http is not None
    port = int(engine._http.session.address.rsplit(":", 1)[1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]
