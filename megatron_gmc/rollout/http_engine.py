"""Client of an engine that speaks SGLang's HTTP interface; nothing it answers is trusted unread.

Used paths: `POST /generate` with token ids, `POST /update_weights_from_disk`, `GET /model_info`.
A whole answer that is not the protocol raises `EngineError`; one sample that cannot be trained on
comes back as its `Refusal`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import httpx
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential_jitter,
)

from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.types import (
    FinishReason,
    IntArray,
    Refusal,
    Sample,
    SampleRequest,
    SamplingParams,
    check_sample,
)

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 120.0  # of a weight update or a question; it may wait for running samples
KEEP_ALIVE_S = 2.0  # below the 5 s after which uvicorn closes: a reused connection is never stale
GET_ATTEMPTS = 3

Answer = TypeVar("Answer")
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class ConnectionLostError(EngineError):
    """The engine could not be reached or hung up."""


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())


class _FinishReason(_Wire):
    type: str


class _VersionSpan(_Wire):
    version: str
    start: int
    end: int


class _MetaInfo(_Wire):
    finish_reason: _FinishReason | None
    completion_tokens: int
    weight_versions: list[_VersionSpan] | None = None
    output_token_logprobs: list[tuple[float | None, Int64, str | None]] | None = None


class _GenerateAnswer(_Wire):
    output_ids: list[Int64]
    meta_info: _MetaInfo


class _UpdateAnswer(_Wire):
    success: bool
    message: str = ""


class _ModelInfo(_Wire):
    weight_version: str
    vocab_size: int | None = None


_FINISH_REASONS: dict[str, FinishReason] = {reason: reason for reason in get_args(FinishReason)}
_GENERATE_ANSWERS = TypeAdapter(list[_GenerateAnswer])
_UPDATE_ANSWER = TypeAdapter(_UpdateAnswer)
_MODEL_INFO = TypeAdapter(_ModelInfo)


class HttpEngine:
    """An engine at `address` (http://host:port), called with `token` as its bearer token.

    `vocabulary` is the policy's: ids outside it are neither sent nor accepted. A call that lasts
    longer than `sample_timeout_s` seconds (sampling) or CONTROL_TIMEOUT_S (the rest) fails.
    """

    def __init__(
        self, name: str, address: str, token: str, *, vocabulary: int, sample_timeout_s: float
    ) -> None:
        self._name = name
        self._address = address
        self._token = token
        self._vocabulary = vocabulary
        self._sample_timeout_s = sample_timeout_s
        self._client: httpx.AsyncClient | None = None
        self._published: set[int] = set()

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        """Connect; the version that the engine holds now counts as published to it."""
        assert self._client is None, "started twice"
        self._client = httpx.AsyncClient(
            base_url=self._address,
            headers={"Authorization": f"Bearer {self._token}"},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),  # _send sets the deadline
            limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_S),
            trust_env=False,  # a proxy from the environment must not see the token
        )
        info = await self._model_info()
        if info.vocab_size is not None and info.vocab_size != self._vocabulary:
            raise EngineError(
                f"{self._name} serves a model with a vocabulary of {info.vocab_size}, the policy's "
                f"is {self._vocabulary}; start it with the policy's folder"
            )
        self._published.add(self._version_number(info))

    async def version(self) -> int:
        return self._version_number(await self._model_info())

    async def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> list[list[Sample | Refusal]]:
        """See `Engine.sample`. Requests of equal `count` travel in one call.

        Raises ValueError for a request that no engine could serve, before anything is sent.
        """
        for request in requests:
            self._check_request(request)
        results: list[list[Sample | Refusal]] = [[] for _ in requests]
        for count in dict.fromkeys(request.count for request in requests):
            members = [i for i, request in enumerate(requests) if request.count == count]
            answers = await self._generate([requests[i] for i in members], count, params)
            for place, i in enumerate(members):
                own = answers[place * count : (place + 1) * count]
                results[i] = [self._read(answer, params) for answer in own]
        return results

    async def update_weights(self, folder: Path, version: int) -> None:
        known = version in self._published
        # before the call: a sample of the new version may arrive before its acknowledgement
        self._published.add(version)
        try:
            await self._update(folder, version)
        except ConnectionLostError:
            raise  # whether it took the version is unknown
        except EngineError:
            if not known:
                self._published.discard(version)
            raise

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _generate(
        self, requests: list[SampleRequest], count: int, params: SamplingParams
    ) -> list[_GenerateAnswer]:
        # one entry per prompt, which is how SGLang takes a seed for each
        sampling_params = [
            {
                "temperature": params.temperature,
                "top_p": 1.0,
                "max_new_tokens": params.max_response_tokens,
                "stop_token_ids": list(params.stop_token_ids),
                "n": count,
                "sampling_seed": request.seed,
            }
            for request in requests
        ]
        body = {
            "input_ids": [list(request.prompt_tokens) for request in requests],
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        response = await self._send("POST", "/generate", self._sample_timeout_s, body)
        answers = self._parse(_GENERATE_ANSWERS, response)
        if len(answers) != count * len(requests):
            raise EngineError(
                f"{self._name} answered {len(answers)} samples to {len(requests)} requests of "
                f"{count} each"
            )
        return answers

    async def _update(self, folder: Path, version: int) -> None:
        response = await self._send(
            "POST",
            "/update_weights_from_disk",
            CONTROL_TIMEOUT_S,
            {"model_path": str(folder.absolute()), "weight_version": str(version)},
        )
        answer = self._parse(_UPDATE_ANSWER, response)
        if not answer.success:
            raise EngineError(f"{self._name} refused version {version}: {answer.message}")
        served = await self.version()
        if served != version:
            raise EngineError(
                f"{self._name} acknowledged version {version} and then reported {served}"
            )

    def _check_request(self, request: SampleRequest) -> None:
        where = f"group {request.group_id}"
        if request.count < 1:
            raise ValueError(f"{where}: count must be at least 1, got {request.count}")
        if not request.prompt_tokens:
            raise ValueError(f"{where}: the prompt has no token")
        for token in request.prompt_tokens:
            if not 0 <= token < self._vocabulary:
                raise ValueError(
                    f"{where}: prompt token id {token} is outside the vocabulary of "
                    f"{self._vocabulary}; the tokenizer is not the model's"
                )

    def _read(self, answer: _GenerateAnswer, params: SamplingParams) -> Sample | Refusal:
        sample = _to_sample(answer)
        if isinstance(sample, Refusal):
            return sample
        carried = {int(version) for version in np.unique(sample.versions)}
        refusal = check_sample(
            sample,
            vocabulary=self._vocabulary,
            max_response_tokens=params.max_response_tokens,
            versions=tuple(carried & self._published),
        )
        return refusal or sample

    async def _model_info(self) -> _ModelInfo:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(ConnectionLostError),
            stop=stop_after_attempt(GET_ATTEMPTS),
            wait=wait_exponential_jitter(multiplier=0.1, max=2.0),
            reraise=True,
        )
        response: httpx.Response = await retrying(
            self._send, "GET", "/model_info", CONTROL_TIMEOUT_S
        )
        return self._parse(_MODEL_INFO, response)

    def _version_number(self, info: _ModelInfo) -> int:
        version = _as_version(info.weight_version)
        if version is None:
            raise EngineError(
                f"{self._name} calls its weights {info.weight_version!r}, which is not a version "
                "number; start it with --weight-version 0"
            )
        return version

    async def _send(
        self, method: str, path: str, timeout_s: float, body: object = None
    ) -> httpx.Response:
        """The response to a call, of status 200; raises EngineError for anything else."""
        if self._client is None:
            raise EngineError(f"{self._name} was not started")
        if self._client.is_closed:
            raise EngineError(f"{self._name} was closed")
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.request(method, path, json=body)
        except TimeoutError as error:
            raise ConnectionLostError(
                f"{self._name} did not answer {path} within {timeout_s:g} s"
            ) from error
        except httpx.TransportError as error:
            raise ConnectionLostError(
                f"{self._name} at {self._address} does not answer {path} "
                f"({type(error).__name__}); is it still running?"
            ) from error
        except httpx.HTTPError as error:
            raise self._not_the_protocol(path, f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise EngineError(
                f"{self._name} answered {path} with status {response.status_code}: "
                f"{_excerpt(response)}"
            )
        return response

    def _parse(self, adapter: TypeAdapter[Answer], response: httpx.Response) -> Answer:
        try:
            return adapter.validate_json(response.content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            what = f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"
            detail = f"{what}; it begins {_excerpt(response)}"
            raise self._not_the_protocol(response.request.url.path, detail) from error

    def _not_the_protocol(self, path: str, detail: str) -> EngineError:
        return EngineError(f"{self._name} answered {path} with something else than asked: {detail}")


def _to_sample(answer: _GenerateAnswer) -> Sample | Refusal:
    """The sample of an answer, each token with its log-prob and version, or why there is none."""
    ids, meta = answer.output_ids, answer.meta_info
    reason = meta.finish_reason.type if meta.finish_reason else None
    if reason == "abort":
        return Refusal("aborted", f"the engine aborted after {len(ids)} tokens")
    if reason not in _FINISH_REASONS:
        return Refusal("finish_reason", f"finish reason {reason!r}")
    if meta.completion_tokens != len(ids):
        return Refusal(
            "length_mismatch", f"{len(ids)} tokens, {meta.completion_tokens} were announced"
        )
    entries = meta.output_token_logprobs
    if entries is None:
        return Refusal("log_prob_missing", "the answer carries no log-probs")
    if len(entries) != len(ids):
        return Refusal("length_mismatch", f"{len(ids)} tokens, {len(entries)} log-probs")
    log_probs: list[float] = []
    for position, (token, (log_prob, log_prob_token, _)) in enumerate(
        zip(ids, entries, strict=True)
    ):
        if log_prob is None:
            return Refusal("log_prob_missing", f"token {position} has no log-prob")
        if log_prob_token != token:
            return Refusal(
                "log_prob_missing",
                f"token {position} is {token}, its log-prob is that of token {log_prob_token}",
            )
        log_probs.append(log_prob)
    versions = _token_versions(meta.weight_versions, len(ids))
    if isinstance(versions, Refusal):
        return versions
    with np.errstate(over="ignore"):  # beyond float32 it becomes infinite, which is refused
        log_prob_array = np.array(log_probs, dtype=np.float32)
    return Sample(
        tokens=np.array(ids, dtype=np.int64),
        log_probs=log_prob_array,
        versions=versions,
        finish_reason=_FINISH_REASONS[reason],
    )


def _token_versions(spans: list[_VersionSpan] | None, length: int) -> IntArray | Refusal:
    """Version of each token, int64 [length], from spans [start, end) that must cover all tokens."""
    versions: IntArray = np.empty(length, dtype=np.int64)
    covered = 0
    for span in spans or []:
        version = _as_version(span.version)
        if version is None:
            return Refusal("version_unknown", f"version {span.version!r} is not a number")
        if span.start != covered or not span.start <= span.end <= length:
            return Refusal("version_missing", f"span {span.start}:{span.end} after {covered}")
        versions[span.start : span.end] = version
        covered = span.end
    if covered != length:
        return Refusal("version_missing", f"{covered} of {length} tokens carry a version")
    return versions


def _as_version(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _excerpt(response: httpx.Response) -> str:
    return repr(response.text[:200])
