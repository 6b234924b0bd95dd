"""ASGI middleware of vLLM's server: it answers as the reference server does.

It answers /generate and adds the tokenizer's hash to /v1/models. Requests that may change the server's state need a
token, all others except /health a key if there is one. Scripts of web pages are refused. Weights that a worker refused
are the caller's error (400), while vLLM has one status for every error in a worker. After a 500 the connection stays
open. Guarantees that everything else passes unchanged. Runs inside vLLM's process, on msgspec and the standard library.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import msgspec

from lachesis.pipeline.inference.access import ServerAccess
from lachesis.pipeline.inference.engines.vllm.generate import VllmRefusal, answer_by_vllm
from lachesis.pipeline.inference.engines.vllm.names import (
    CALLERS_PATHS,
    CONTROL_TOKEN,
    REFUSED,
    SAMPLING_KEY,
    TOKENIZER_HASH,
)
from lachesis.pipeline.inference.engines.vllm.parent_watch import end_with_owner
from lachesis.schemas.errors import DataError

__all__ = ["VllmMiddleware"]

log = logging.getLogger("vllm.lachesis")


class VllmMiddleware:
    """Wraps an ASGI application."""

    def __init__(self, app: Any) -> None:
        self._app = app
        end_with_owner()
        self._hash = os.environ[TOKENIZER_HASH]
        # taken out before anything that vLLM starts could read them
        token, key = os.environ.pop(CONTROL_TOKEN), os.environ.pop(SAMPLING_KEY, None)
        self._access = ServerAccess(token, key, CALLERS_PATHS)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "nothing is served here by a web socket"})
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif b"origin" in (headers := dict(scope["headers"])):
            await _send_error(send, 403, "ForbiddenError", "requests from web pages are not answered")
        elif (why := self._refusal(path, headers)) is not None:
            await _send_error(send, 401, "AuthenticationError", why)
        elif path == "/v1/models":
            await self._models(scope, receive, send)
        elif path == "/generate" and scope["method"] == "POST":
            await self._generate(scope, receive, send)
        else:
            await self._explained(scope, receive, send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> str | None:
        return self._access.refusal(path, headers.get(b"authorization", b"").decode("latin1"))

    async def _models(self, scope: Any, receive: Any, send: Any) -> None:
        messages: list[dict[str, Any]] = []

        async def keep(message: dict[str, Any]) -> None:
            messages.append(message)

        await self._app(scope, receive, keep)
        status, body = messages[0]["status"], b"".join(message.get("body", b"") for message in messages[1:])
        if status == 200:
            models = msgspec.json.decode(body)
            for model in models["data"]:
                model["tokenizer_hash"] = self._hash
            body = msgspec.json.encode(models)
        await _send_json(send, status, body)

    async def _generate(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            body = await answer_by_vllm(self._explained, scope, receive)
        except DataError as error:
            await _send_error(send, 400, "BadRequestError", str(error))
        except VllmRefusal as refusal:
            await _send_json(send, refusal.status, refusal.body)
        else:
            await _send_json(send, 200, body)

    async def _explained(self, scope: Any, receive: Any, send: Any) -> None:
        started = False

        async def note(message: dict[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception as error:
            if started:
                raise
            refused = REFUSED in str(error)
            if not refused:
                log.exception("%s failed", scope["path"])
            text, kind = str(error), "BadRequestError" if refused else "InternalServerError"
            status = 400 if refused else 500
            await _send_error(send, status, kind, text)


async def _send_error(send: Any, status: int, kind: str, text: str) -> None:
    body = {"error": {"message": text, "type": kind, "param": None, "code": status}}
    await _send_json(send, status, msgspec.json.encode(body))


async def _send_json(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
