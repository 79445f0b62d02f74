"""Client of an engine that speaks SGLang's HTTP interface; nothing it answers is trusted unread.

Used paths: `POST /generate` with token ids, `POST /update_weights_from_disk`, `GET /model_info`.
A whole answer that is not the protocol raises `EngineError`; one sample that cannot be trained on
comes back as its `Refusal`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from megatron_gmc.rollout.answers import GENERATE_ANSWERS, GenerateAnswer, as_version, to_sample
from megatron_gmc.rollout.engine import EngineError
from megatron_gmc.rollout.http_session import ConnectionLostError, HttpSession, Wire
from megatron_gmc.rollout.types import (
    Refusal,
    Sample,
    SampleRequest,
    SamplingParams,
    check_sample,
)

CONTROL_TIMEOUT_S = 120.0  # of a weight update or a question; it may wait for running samples


class UpdateAnswer(Wire):
    success: bool
    message: str = ""


class _ModelInfo(Wire):
    weight_version: str
    vocab_size: int | None = None


UPDATE_ANSWER = TypeAdapter(UpdateAnswer)
_MODEL_INFO = TypeAdapter(_ModelInfo)


class HttpEngine:
    """An engine at `address` (http://host:port), called with `token` as its bearer token.

    `vocabulary` is the policy's: ids outside it are neither sent nor accepted. `context` is the
    most tokens that a prompt and its response may have together. A call that lasts longer than
    `sample_timeout_s` seconds (sampling) or CONTROL_TIMEOUT_S (the rest) fails.
    """

    def __init__(
        self,
        name: str,
        address: str,
        token: str,
        *,
        vocabulary: int,
        sample_timeout_s: float,
        context: int | None = None,
        admin_token: str | None = None,
    ) -> None:
        self._session = HttpSession(name, address, token, admin_token)
        self._vocabulary = vocabulary
        self._context = context
        self._sample_timeout_s = sample_timeout_s
        self._published: set[int] = set()
        self.cache_key: str | None = None
        """Where set, prompts share a cache only with requests of the same key (`extra_key`)."""

    @property
    def name(self) -> str:
        return self._session.name

    @property
    def session(self) -> HttpSession:
        """The connections, for calls that this class does not make."""
        return self._session

    async def start(self) -> None:
        """Connect; the version that the engine holds now counts as published to it."""
        self._session.open()
        info = await self._model_info()
        if info.vocab_size is not None and info.vocab_size != self._vocabulary:
            raise EngineError(
                f"{self.name} serves a model with a vocabulary of {info.vocab_size}, the policy's "
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
            self._check_request(request, params)
        results: list[list[Sample | Refusal]] = [[] for _ in requests]
        for count in dict.fromkeys(request.count for request in requests):
            members = [i for i, request in enumerate(requests) if request.count == count]
            answers = await self._generate([requests[i] for i in members], count, params)
            for place, i in enumerate(members):
                own = answers[place * count : (place + 1) * count]
                results[i] = [self._read(answer, params) for answer in own]
        return results

    async def update_weights(self, folder: Path, version: int) -> None:
        async with self.publishing(version):
            await self._update(folder, version)

    @asynccontextmanager
    async def publishing(self, version: int) -> AsyncIterator[None]:
        """Accept samples of `version` from here on; at the end, check that the engine holds it."""
        known = version in self._published
        # before the call: a sample of the new version may arrive before its acknowledgement
        self._published.add(version)
        try:
            yield
            await self._check_version(version)
        except ConnectionLostError:
            raise  # whether it took the version is unknown
        except EngineError:
            if not known:
                self._published.discard(version)
            raise

    async def release_memory(self) -> None:
        """It shares no device with a learner."""

    async def close(self) -> None:
        await self._session.close()

    async def _generate(
        self, requests: list[SampleRequest], count: int, params: SamplingParams
    ) -> list[GenerateAnswer]:
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
        body: dict[str, object] = {
            "input_ids": [list(request.prompt_tokens) for request in requests],
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        if self.cache_key is not None:
            body["extra_key"] = self.cache_key
        answers = await self._session.post(
            GENERATE_ANSWERS, "/generate", self._sample_timeout_s, body
        )
        if len(answers) != count * len(requests):
            raise EngineError(
                f"{self.name} answered {len(answers)} samples to {len(requests)} requests of "
                f"{count} each"
            )
        return answers

    async def _update(self, folder: Path, version: int) -> None:
        answer = await self._session.post(
            UPDATE_ANSWER,
            "/update_weights_from_disk",
            CONTROL_TIMEOUT_S,
            {"model_path": str(folder.absolute()), "weight_version": str(version)},
            admin=True,
        )
        if not answer.success:
            raise EngineError(f"{self.name} refused version {version}: {answer.message}")

    async def _check_version(self, version: int) -> None:
        served = await self.version()
        if served != version:
            raise EngineError(
                f"{self.name} acknowledged version {version} and then reported {served}"
            )

    def _check_request(self, request: SampleRequest, params: SamplingParams) -> None:
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
        room = None if self._context is None else self._context - params.max_response_tokens
        if room is not None and len(request.prompt_tokens) > room:
            raise ValueError(
                f"{where}: the prompt has {len(request.prompt_tokens)} tokens, and the context of "
                f"{self._context} leaves room for {room} beside a response of "
                f"{params.max_response_tokens}"
            )

    def _read(self, answer: GenerateAnswer, params: SamplingParams) -> Sample | Refusal:
        sample = to_sample(answer)
        if isinstance(sample, Refusal):
            return sample
        carried = {int(version) for version in np.unique(sample.versions)}
        refusal = check_sample(
            sample,
            vocabulary=self._vocabulary,
            max_response_tokens=params.max_response_tokens,
            versions=tuple(carried & self._published),
        )
        return refusal or _ended_otherwise(sample, params) or sample

    async def _model_info(self) -> _ModelInfo:
        return await self._session.get(_MODEL_INFO, "/model_info", CONTROL_TIMEOUT_S)

    def _version_number(self, info: _ModelInfo) -> int:
        version = as_version(info.weight_version)
        if version is None:
            raise EngineError(
                f"{self.name} calls its weights {info.weight_version!r}, which is not a version "
                "number; start it with --weight-version 0"
            )
        return version


def _ended_otherwise(sample: Sample, params: SamplingParams) -> Refusal | None:
    """Refuse a response that stopped at no stop token, or at its length without reaching it."""
    last = int(sample.tokens[-1])
    if sample.finish_reason == "stop" and last not in params.stop_token_ids:
        return Refusal("finish_reason", f"it stopped at token {last}, which is no stop token")
    if sample.finish_reason == "length" and len(sample.tokens) < params.max_response_tokens:
        return Refusal(
            "finish_reason",
            f"it ended by length after {len(sample.tokens)} of {params.max_response_tokens} tokens",
        )
    return None
