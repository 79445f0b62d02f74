"""The embedded engine's HTTP side: a subset of SGLang's interface over one model.

All work on the model runs in one worker thread, first come first served. So a request's samples
never depend on what else is running, new weights take effect between two requests, and `/health`
answers meanwhile.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import PreTrainedModel

from megatron_gmc.rollout.embedded.requests import (
    BadRequestError,
    GenerateBody,
    UpdateWeightsBody,
    parse,
)
from megatron_gmc.rollout.embedded.sampling import (
    NonFiniteLogProbError,
    Samples,
    SamplingJob,
    sample,
)
from megatron_gmc.rollout.embedded.weights import WeightsError, load_weights

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Policy:
    """The weights that are served; replaced as a whole, so its parts always belong together."""

    model: PreTrainedModel
    version: int
    folder: Path

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its response together."""
        return int(self.model.config.get_text_config().max_position_embeddings)


def build_app(policy: Policy, token: str) -> Starlette:
    """The ASGI app; every path but /health needs `Authorization: Bearer <token>`."""
    endpoints = _Endpoints(policy)
    return Starlette(
        routes=[
            Route("/health", endpoints.health, methods=["GET"]),
            Route("/model_info", endpoints.model_info, methods=["GET"]),
            Route("/generate", endpoints.generate, methods=["POST"]),
            Route("/update_weights_from_disk", endpoints.update_weights, methods=["POST"]),
        ],
        middleware=[Middleware(_BearerToken, token=token)],
        exception_handlers={
            BadRequestError: _bad_request,
            NonFiniteLogProbError: _broken_weights,
        },
    )


class _BearerToken:
    """Answers 401 to whoever does not know the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        else:
            await _error(401, "the bearer token is missing or wrong")(scope, receive, send)


class _Endpoints:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    async def health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def model_info(self, request: Request) -> Response:
        policy = self._policy
        return JSONResponse(
            {
                "model_path": str(policy.folder),
                "weight_version": str(policy.version),
                "vocab_size": policy.vocabulary,
                "context_length": policy.context,
            }
        )

    async def generate(self, request: Request) -> Response:
        body = parse(GenerateBody, await request.body())
        policy = self._policy  # sizes are the same in every version
        job = body.job(vocabulary=policy.vocabulary, context=policy.context)
        content = await self._run(lambda: self._generate(job))
        return Response(content, media_type="application/json")

    async def update_weights(self, request: Request) -> Response:
        body = parse(UpdateWeightsBody, await request.body())
        try:
            version = await self._run(lambda: self._update(body))
        except WeightsError as error:
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        return JSONResponse({"success": True, "message": f"weight version is {version}"})

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _generate(self, job: SamplingJob) -> bytes:
        policy = self._policy
        return json.dumps(_answers(job, sample(policy.model, job), policy.version)).encode()

    def _update(self, body: UpdateWeightsBody) -> int:
        old, folder = self._policy, Path(body.model_path)
        model = load_weights(type(old.model), old.model.config, folder)
        self._policy = Policy(model=model, version=int(body.weight_version), folder=folder)
        return self._policy.version


def _answers(job: SamplingJob, samples: Samples, version: int) -> list[dict[str, object]]:
    """One answer per row, as SGLang gives them for a list of prompts."""
    answers: list[dict[str, object]] = []
    lengths = samples.lengths.tolist()
    stopped = samples.stopped.tolist()
    for row, (ids, log_probs) in enumerate(
        zip(samples.tokens.tolist(), samples.log_probs.tolist(), strict=True)
    ):
        length = lengths[row]
        meta = {
            "finish_reason": {"type": "stop" if stopped[row] else "length"},
            "prompt_tokens": len(job.prompts[row // job.count]),
            "completion_tokens": length,
            "weight_version": str(version),
            "weight_versions": [{"version": str(version), "start": 0, "end": length}],
            "output_token_logprobs": [
                [log_prob, token, None]
                for log_prob, token in zip(log_probs[:length], ids[:length], strict=True)
            ],
        }
        answers.append({"output_ids": ids[:length], "meta_info": meta})
    return answers


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=status)


async def _bad_request(request: Request, error: Exception) -> Response:
    return _error(400, str(error))


async def _broken_weights(request: Request, error: Exception) -> Response:
    return _error(500, str(error))
