"""The connections to one engine: bearer tokens, deadlines, and errors that name the engine."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential_jitter,
)

from megatron_gmc.rollout.engine import EngineError

CONNECT_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 2.0  # below the 5 s after which uvicorn closes: a reused connection is never stale
GET_ATTEMPTS = 3

Answer = TypeVar("Answer")


class ConnectionLostError(EngineError):
    """The engine could not be reached or hung up."""


class Wire(BaseModel):
    """What an engine answers: strict about types, silent about fields that nobody here reads."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())


class HttpSession:
    """Calls to the engine `name` at `address` (http://host:port).

    `token` goes with every call, `admin_token` in its place where a call says so; neither is ever
    part of an error. Every failure is an EngineError that begins with the name.
    """

    def __init__(self, name: str, address: str, token: str, admin_token: str | None = None) -> None:
        self.name = name
        self.address = address
        self._token = token
        self._admin_token = token if admin_token is None else admin_token
        self._client: httpx.AsyncClient | None = None

    def open(self) -> None:
        assert self._client is None, "opened twice"
        self._client = httpx.AsyncClient(
            base_url=self.address,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),  # send sets the deadline
            limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_S),
            trust_env=False,  # a proxy from the environment must not see the token
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def send(
        self, method: str, path: str, timeout_s: float, body: object = None, *, admin: bool = False
    ) -> httpx.Response:
        """The response to a call, of status 200; raises EngineError for anything else.

        A call that is given up, by its deadline or by cancellation, closes its connection.
        """
        if self._client is None:
            raise EngineError(f"{self.name} was not started")
        if self._client.is_closed:
            raise EngineError(f"{self.name} was closed")
        headers = {"Authorization": f"Bearer {self._admin_token if admin else self._token}"}
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.request(method, path, json=body, headers=headers)
        except TimeoutError as error:
            raise ConnectionLostError(
                f"{self.name} did not answer {path} within {timeout_s:g} s"
            ) from error
        except httpx.TransportError as error:
            raise ConnectionLostError(
                f"{self.name} at {self.address} does not answer {path} "
                f"({type(error).__name__}); is it still running?"
            ) from error
        except httpx.HTTPError as error:
            raise self._not_the_protocol(path, f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise EngineError(
                f"{self.name} answered {path} with status {response.status_code}: "
                f"{self._excerpt(response)}"
            )
        return response

    async def get(self, adapter: TypeAdapter[Answer], path: str, timeout_s: float) -> Answer:
        """Ask a question, again where the connection breaks."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(ConnectionLostError),
            stop=stop_after_attempt(GET_ATTEMPTS),
            wait=wait_exponential_jitter(multiplier=0.1, max=2.0),
            reraise=True,
        )
        response: httpx.Response = await retrying(self.send, "GET", path, timeout_s)
        return self.parse(adapter, response)

    async def post(
        self,
        adapter: TypeAdapter[Answer],
        path: str,
        timeout_s: float,
        body: object,
        *,
        admin: bool = False,
    ) -> Answer:
        """Send a call once: what it does may have been done although its answer got lost."""
        return self.parse(adapter, await self.send("POST", path, timeout_s, body, admin=admin))

    def parse(self, adapter: TypeAdapter[Answer], response: httpx.Response) -> Answer:
        try:
            return adapter.validate_json(response.content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            what = f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"
            detail = f"{what}; it begins {self._excerpt(response)}"
            raise self._not_the_protocol(response.request.url.path, detail) from error

    def _not_the_protocol(self, path: str, detail: str) -> EngineError:
        return EngineError(f"{self.name} answered {path} with something else than asked: {detail}")

    def _excerpt(self, response: httpx.Response) -> str:
        text = response.text
        for secret in (self._token, self._admin_token):
            text = text.replace(secret, "<token>")  # a server may tell its own settings
        return repr(text[:200])
