"""What the client makes of servers that answer wrongly, late or not at all."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.http_engine import HttpEngine
from megatron_gmc.rollout.http_session import ConnectionLostError
from megatron_gmc.rollout.types import Refusal, Sample, SampleRequest, SamplingParams
from tests.rollout.scripted_server import VOCABULARY, Json, ScriptedServer, good

pytestmark = pytest.mark.anyio

TOKEN = "a-secret-token"
REQUEST = SampleRequest(group_id=3, prompt_tokens=(1, 2), count=2, seed=11)
PARAMS = SamplingParams(temperature=0.9, max_response_tokens=4, stop_token_ids=(0, 7))


@pytest.fixture(scope="module")
def running_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def server(running_server: ScriptedServer) -> ScriptedServer:
    running_server.reset()
    return running_server


@pytest.fixture
async def engine(server: ScriptedServer) -> AsyncIterator[HttpEngine]:
    engine = HttpEngine(
        "scripted", server.address, TOKEN, vocabulary=VOCABULARY, sample_timeout_s=30
    )
    await engine.start()
    yield engine
    await engine.close()


async def test_a_good_answer_becomes_samples(server: ScriptedServer, engine: HttpEngine) -> None:
    ((first, second),) = await engine.sample([REQUEST], PARAMS)
    for sample in (first, second):
        assert isinstance(sample, Sample)
        assert sample.tokens.tolist() == [5, 6, 0] and sample.tokens.dtype == np.int64
        assert sample.log_probs.tolist() == [-1.5, -0.25, -2.0]
        assert sample.log_probs.dtype == np.float32
        assert sample.versions.tolist() == [4, 4, 4]
        assert sample.finish_reason == "stop"
    path, authorization, body = server.received[-1]
    assert (path, authorization) == ("/generate", f"Bearer {TOKEN}")
    assert body == {
        "input_ids": [[1, 2]],
        "sampling_params": [
            {
                "temperature": 0.9,
                "top_p": 1.0,
                "max_new_tokens": 4,
                "stop_token_ids": [0, 7],
                "n": 2,
                "sampling_seed": 11,
            }
        ],
        "return_logprob": True,
    }


def _meta(**changes: Json) -> Callable[[Json], None]:
    return lambda answer: answer["meta_info"].update(changes)


def _without(key: str) -> Callable[[Json], None]:
    return lambda answer: answer["meta_info"].pop(key)


def _log_prob(entry: Json) -> Callable[[Json], None]:
    return lambda answer: answer["meta_info"]["output_token_logprobs"].__setitem__(1, entry)


def _token(token: int) -> Callable[[Json], None]:
    def change(answer: Json) -> None:
        answer["output_ids"][1] = token
        answer["meta_info"]["output_token_logprobs"][1][1] = token

    return change


def _token_last(token: int) -> Callable[[Json], None]:
    def change(answer: Json) -> None:
        answer["output_ids"][-1] = token
        answer["meta_info"]["output_token_logprobs"][-1][1] = token

    return change


def _span(*spans: tuple[str, int, int]) -> Callable[[Json], None]:
    listed = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    return _meta(weight_versions=listed)


def _empty(answer: Json) -> None:
    answer["output_ids"] = []
    answer["meta_info"].update(completion_tokens=0, weight_versions=[], output_token_logprobs=[])


def _too_long(answer: Json) -> None:
    answer["output_ids"] = [5] * 5
    spans = [{"version": "4", "start": 0, "end": 5}]
    entries = [[-1.0, 5, None]] * 5
    answer["meta_info"].update(
        completion_tokens=5, weight_versions=spans, output_token_logprobs=entries
    )


REFUSED: dict[str, tuple[Callable[[Json], object], str, str]] = {
    "T6 log-probs missing": (_without("output_token_logprobs"), "log_prob_missing", "no log-probs"),
    "T6 log-probs null": (_meta(output_token_logprobs=None), "log_prob_missing", "no log-probs"),
    "T6 log-prob null": (_log_prob([None, 6, None]), "log_prob_missing", "token 1"),
    "T7 log-prob of another token": (_log_prob([-1.0, 9, None]), "log_prob_missing", "token 9"),
    "log-prob list one shorter": (
        _meta(output_token_logprobs=[[-1.5, 5, None], [-0.25, 6, None]]),
        "length_mismatch",
        "3 tokens, 2 log-probs",
    ),
    "log-prob infinite": (_log_prob([-np.inf, 6, None]), "log_prob_not_finite", "token 1"),
    "log-prob NaN": (_log_prob([np.nan, 6, None]), "log_prob_not_finite", "token 1"),
    "log-prob beyond float32": (_log_prob([-1e39, 6, None]), "log_prob_not_finite", "token 1"),
    "G7 aborted": (
        _meta(finish_reason={"type": "abort", "message": "paused"}),
        "aborted",
        "after 3 tokens",
    ),
    "finish reason unknown": (_meta(finish_reason={"type": "tired"}), "finish_reason", "tired"),
    "finish reason null": (_meta(finish_reason=None), "finish_reason", "None"),
    "id outside the vocabulary": (_token(20), "token_out_of_vocabulary", "20"),
    "id negative": (_token(-1), "token_out_of_vocabulary", "-1"),
    "other number of tokens announced": (_meta(completion_tokens=4), "length_mismatch", "4"),
    "no token": (_empty, "empty", "no token"),
    "more tokens than asked for": (_too_long, "too_long", "5 tokens"),
    "T5 stopped at another id": (_token_last(9), "finish_reason", "token 9, which is no stop"),
    "ended by length early": (
        _meta(finish_reason={"type": "length"}),
        "finish_reason",
        "after 3 of 4 tokens",
    ),
    "versions missing": (_without("weight_versions"), "version_missing", "0 of 3"),
    "versions null": (_meta(weight_versions=None), "version_missing", "0 of 3"),
    "versions end early": (_span(("4", 0, 2)), "version_missing", "2 of 3"),
    "versions end late": (_span(("4", 0, 4)), "version_missing", "0:4"),
    "versions start late": (_span(("4", 1, 3)), "version_missing", "1:3"),
    "versions overlap": (_span(("4", 0, 2), ("4", 1, 3)), "version_missing", "1:3"),
    "versions go back": (_span(("4", 0, 3), ("4", 3, 2)), "version_missing", "3:2"),
    "version never published": (_span(("5", 0, 3)), "version_unknown", "version 5"),
    "one of two never published": (_span(("4", 0, 2), ("9", 2, 3)), "version_unknown", "9"),
    "version without a number": (_span(("default", 0, 3)), "version_unknown", "default"),
    "version negative": (_span(("-4", 0, 3)), "version_unknown", "-4"),
    "version huge": (_span(("9" * 30, 0, 3)), "version_unknown", "999"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_wrong_sample_is_refused_and_its_neighbour_kept(
    server: ScriptedServer, engine: HttpEngine, case: str
) -> None:
    """T6, T7, G7 and their kind: one sample refused by reason, never padded, never guessed."""
    change, reason, detail = REFUSED[case]
    bent = copy.deepcopy(good())
    change(bent)
    server.reply("/generate", [bent, good()])
    ((refused, kept),) = await engine.sample([REQUEST], PARAMS)
    assert isinstance(refused, Refusal)
    assert refused.reason == reason
    assert detail in refused.detail
    assert isinstance(kept, Sample)


GARBAGE: dict[str, tuple[Json, int]] = {
    "HTML": (b"<html><body>502 Bad Gateway</body></html>", 200),
    "truncated": (json.dumps([good(), good()]).encode()[:-20], 200),
    "empty": (b"", 200),
    "not text": (b"\xff\xfe\x00", 200),
    "null": (None, 200),
    "one answer bare": (good(), 200),
    "one answer too few": ([good()], 200),
    "one answer too many": ([good()] * 3, 200),
    "ids as text": ([good() | {"output_ids": ["5", "6", "0"]}, good()], 200),
    "ids as fractions": ([good() | {"output_ids": [5.5, 6, 0]}, good()], 200),
    "ids beyond 64 bits": ([good() | {"output_ids": [2**70, 6, 0]}, good()], 200),
    "no meta_info": ([{"output_ids": [5]}, good()], 200),
    "no output_ids": ([{"meta_info": good()["meta_info"]}, good()], 200),
    "status 500": ({"error": {"message": "boom"}}, 500),
    "status 500 HTML": (b"<html>Internal Server Error</html>", 500),
    "status 401": ({"error": {"message": "no"}}, 401),
    "status 404": (b"Not Found", 404),
    "status 302": (b"", 302),
    "status 206": ([good(), good()], 206),
}


@pytest.mark.parametrize("case", GARBAGE)
async def test_what_is_not_the_protocol_is_an_error_with_the_engines_name(
    server: ScriptedServer, engine: HttpEngine, case: str
) -> None:
    content, status = GARBAGE[case]
    server.reply("/generate", content, status)
    with pytest.raises(EngineError, match="scripted answered") as caught:
        await engine.sample([REQUEST], PARAMS)
    assert TOKEN not in str(caught.value)
    server.reply("/generate", [good(), good()])
    ((first, _),) = await engine.sample([REQUEST], PARAMS)  # and the client goes on
    assert isinstance(first, Sample)


async def test_versions_inside_a_response_follow_their_tokens(
    server: ScriptedServer, engine: HttpEngine
) -> None:
    """L7: spans become one version per token."""
    server.reply("/model_info", {"weight_version": "5"})
    await engine.update_weights(Path("weights"), 5)
    bent = good()
    _span(("4", 0, 1), ("5", 1, 3))(bent)
    server.reply("/generate", [bent, good()])
    ((switched, _),) = await engine.sample([REQUEST], PARAMS)
    assert isinstance(switched, Sample)
    assert switched.versions.tolist() == [4, 5, 5]


async def test_requests_of_one_count_share_a_call_and_keep_their_order(
    server: ScriptedServer, engine: HttpEngine
) -> None:
    answers = []
    for token in (5, 6, 7, 8):
        answer = good()
        _token(token)(answer)
        answers.append(answer)
    server.reply("/generate", answers)
    other = SampleRequest(group_id=4, prompt_tokens=(3,), count=2, seed=12)
    server.received.clear()
    results = await engine.sample([REQUEST, other], PARAMS)
    middles = [[int(s.tokens[1]) for s in result if isinstance(s, Sample)] for result in results]
    assert middles == [[5, 6], [7, 8]]
    ((_, _, body),) = server.received
    assert body["input_ids"] == [[1, 2], [3]]
    assert [params["sampling_seed"] for params in body["sampling_params"]] == [11, 12]
    assert await engine.sample([], PARAMS) == []


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        ({"success": False, "message": "no such tensor"}, 400, "no such tensor"),
        ({"success": False, "message": "no such tensor"}, 200, "no such tensor"),
        (b"<html>", 200, "something else"),
        ({}, 200, "success"),
    ],
)
async def test_samples_never_carry_a_version_that_was_refused(
    server: ScriptedServer, engine: HttpEngine, content: Json, status: int, message: str
) -> None:
    """L6: a named error, and a sample that claims the version is refused."""
    server.reply("/update_weights_from_disk", content, status)
    with pytest.raises(EngineError, match=f"scripted.*{message}"):
        await engine.update_weights(Path("weights"), 5)
    claiming = good()
    _span(("5", 0, 3))(claiming)
    server.reply("/generate", [claiming, good()])
    ((refused, _),) = await engine.sample([REQUEST], PARAMS)
    assert isinstance(refused, Refusal) and refused.reason == "version_unknown"


async def test_a_refused_repeat_does_not_unpublish_a_version(
    server: ScriptedServer, engine: HttpEngine
) -> None:
    server.reply("/update_weights_from_disk", {"success": False, "message": "busy"}, 400)
    with pytest.raises(EngineError, match="busy"):
        await engine.update_weights(Path("weights"), 4)
    ((kept, _),) = await engine.sample([REQUEST], PARAMS)
    assert isinstance(kept, Sample)


async def test_an_acknowledgement_is_checked(server: ScriptedServer, engine: HttpEngine) -> None:
    """A server that says yes and keeps the old version is found out."""
    with pytest.raises(EngineError, match="acknowledged version 5 and then reported 4"):
        await engine.update_weights(Path("weights"), 5)
    path, _, body = next(entry for entry in server.received if entry[2] is not None)
    assert path == "/update_weights_from_disk"
    assert body == {"model_path": str(Path("weights").absolute()), "weight_version": "5"}


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"weight_version": "default"}, "--weight-version 0"),
        ({"weight_version": "4", "vocab_size": 21}, "vocabulary of 21, the policy's is 20"),
        ({"weight_version": 4}, "weight_version"),
        (b"<html>", "something else"),
    ],
)
async def test_a_server_with_another_model_is_refused_at_the_start(
    server: ScriptedServer, info: Json, message: str
) -> None:
    server.reply("/model_info", info)
    engine = HttpEngine(
        "scripted", server.address, TOKEN, vocabulary=VOCABULARY, sample_timeout_s=30
    )
    with pytest.raises(EngineError, match=f"scripted.*{message}"):
        await engine.start()
    await engine.close()


async def test_a_silent_server_is_given_up(server: ScriptedServer) -> None:
    engine = HttpEngine(
        "scripted", server.address, TOKEN, vocabulary=VOCABULARY, sample_timeout_s=0.1
    )
    await engine.start()
    server.delay_s = 1.0
    with pytest.raises(ConnectionLostError, match=r"scripted did not answer /generate within 0\.1"):
        await engine.sample([REQUEST], PARAMS)
    await engine.close()


async def test_a_call_before_start_or_after_close_says_so(server: ScriptedServer) -> None:
    engine = HttpEngine(
        "scripted", server.address, TOKEN, vocabulary=VOCABULARY, sample_timeout_s=30
    )
    with pytest.raises(EngineError, match="scripted was not started"):
        await engine.version()
    await engine.start()
    await engine.close()
    with pytest.raises(EngineError, match="scripted was closed"):
        await engine.sample([REQUEST], PARAMS)


async def test_nobody_listening_is_an_error_with_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    engine = HttpEngine("gone", address, TOKEN, vocabulary=VOCABULARY, sample_timeout_s=30)
    with pytest.raises(ConnectionLostError, match=f"gone at {address} does not answer"):
        await engine.start()
    await engine.close()


async def test_a_prompt_beyond_the_context_is_not_sent(server: ScriptedServer) -> None:
    limits = {"vocabulary": VOCABULARY, "context": 5}
    engine = HttpEngine("scripted", server.address, TOKEN, sample_timeout_s=30, **limits)
    await engine.start()
    server.received.clear()
    with pytest.raises(ValueError, match=r"group 3: the prompt has 2 tokens.*leaves room for 1"):
        await engine.sample([REQUEST], PARAMS)
    assert not server.received
    await engine.close()


async def test_a_server_that_tells_the_token_does_not_bring_it_into_an_error(
    server: ScriptedServer, engine: HttpEngine
) -> None:
    server.reply("/generate", {"api_key": TOKEN}, 500)
    with pytest.raises(EngineError, match=r"status 500.*<token>") as caught:
        await engine.sample([REQUEST], PARAMS)
    assert TOKEN not in str(caught.value)


async def test_only_questions_are_asked_again() -> None:
    """A connection that breaks: GET is repeated, a POST may have been carried out and is not."""
    calls: list[str] = []
    info = json.dumps({"weight_version": "4"}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(info)}\r\nConnection: close\r\n\r\n".encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        calls.append(request.split(maxsplit=1)[0].decode())
        if calls == ["GET", "GET"]:  # the first is dropped, and every POST
            writer.write(head + info)
            await writer.drain()
        writer.close()

    flaky = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{flaky.sockets[0].getsockname()[1]}"
    engine = HttpEngine("flaky", address, TOKEN, vocabulary=VOCABULARY, sample_timeout_s=30)
    await engine.start()
    assert calls == ["GET", "GET"]
    with pytest.raises(ConnectionLostError, match="flaky at"):
        await engine.sample([REQUEST], PARAMS)
    with pytest.raises(ConnectionLostError, match="flaky at"):
        await engine.update_weights(Path("weights"), 5)
    assert calls == ["GET", "GET", "POST", "POST"]
    await engine.close()
    flaky.close()
