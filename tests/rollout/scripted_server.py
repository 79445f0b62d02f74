"""An HTTP server that answers what a test tells it to, and a good answer to bend."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

VOCABULARY = 20
Json = Any  # the tests bend JSON at will


class ScriptedServer:
    """Answers each path with what a test put there; keeps what it was sent."""

    def __init__(self) -> None:
        self.replies: dict[str, tuple[int, bytes]] = {}
        self.received: list[tuple[str, str, Json]] = []
        self.delay_s = 0.0
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}
        )
        self._thread.start()

    def reset(self) -> None:
        self.received.clear()
        self.delay_s = 0.0
        self.reply("/model_info", {"weight_version": "4", "vocab_size": VOCABULARY})
        self.reply("/generate", [good(), good()])
        self.reply("/update_weights_from_disk", {"success": True, "message": "ok"})

    def reply(self, path: str, content: Json, status: int = 200) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.replies[path] = (status, raw)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _answer(self, request: Request) -> Response:
        body = await request.body()
        authorization = request.headers.get("authorization", "")
        content = json.loads(body) if body else None
        self.received.append((request.url.path, authorization, content))
        await asyncio.sleep(self.delay_s)
        status, raw = self.replies[request.url.path]
        return Response(raw, status_code=status, media_type="application/json")


def good() -> Json:
    return {
        "output_ids": [5, 6, 0],
        "meta_info": {
            "id": "x",
            "finish_reason": {"type": "stop", "matched": 0},
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "weight_version": "4",
            "weight_versions": [{"version": "4", "start": 0, "end": 3}],
            "output_token_logprobs": [[-1.5, 5, None], [-0.25, 6, "x"], [-2.0, 0, None]],
        },
    }
