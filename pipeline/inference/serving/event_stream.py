"""Streams answers: tokens as the engine samples them, as server-sent events to a client.

Guarantees that a stream buffers no more than its request's tokens, that a failure within the stream is sent as an
event, and that the engine's work ends when the client hangs up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any, Self

import anyio
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.inference.serving.engine import SamplingEngine
from lachesis.pipeline.inference.serving.results import GenerationResult, SampledToken
from lachesis.schemas.errors import LachesisError

__all__ = ["EventStream", "SampledTokens"]


class SampledTokens:
    """The tokens of one request as they are sampled; they end when `future`, its result, is done.

    Made in the event loop that reads it. Raises as `SamplingEngine.submit`.
    """

    def __init__(self, engine: SamplingEngine, prompt: list[int], params: SamplingParams) -> None:
        self._loop = asyncio.get_running_loop()
        self._tokens: deque[SampledToken] = deque()
        self._changed = anyio.Event()
        self._ended = False
        self.future: Future[GenerationResult] = engine.submit(prompt, params, self._report)
        self.future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._end))  # after the last token

    def _report(self, token: SampledToken) -> None:
        self._loop.call_soon_threadsafe(self._append, token)

    def _append(self, token: SampledToken) -> None:
        self._tokens.append(token)
        self._changed.set()

    def _end(self) -> None:
        self._ended = True
        self._changed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SampledToken:
        while not self._tokens:
            if self._ended:
                raise StopAsyncIteration
            self._changed = anyio.Event()
            await self._changed.wait()
        return self._tokens.popleft()


class EventStream(Response):
    """A response of server-sent events, one for each of `events`, and `[DONE]`. `future`: cancelled if the client hangs
    up."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], future: Future[Any] | None = None) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache"})
        self._events = events
        self._future = future

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, receive)
                await self._answer(send)
                tasks.cancel_scope.cancel()
        finally:
            if self._future is not None:
                self._future.cancel()  # no effect once it is done

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if self._future is not None:
            self._future.cancel()

    async def _answer(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await self._send(send, msgspec.json.encode(event))
        except LachesisError as error:
            body = {"error": {"message": str(error), "type": type(error).__name__, "param": None, "code": 503}}
            await self._send(send, msgspec.json.encode(body))
        await self._send(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
