"""Replies of the HTTP server.

It sends values as JSON and errors as vLLM's error bodies, decides which clients are answered, and waits for the engine.

Guarantees that every error this package raises on purpose has one status code, and that work is cancelled when the
client that waits for it is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import anyio
import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lachesis.pipeline.errors import InfrastructureError, NotFoundError
from lachesis.pipeline.inference.access import ServerAccess
from lachesis.pipeline.inference.prompt_tree import PromptPath
from lachesis.pipeline.inference.protocol import MAX_BODY_BYTES, SamplingParams
from lachesis.pipeline.inference.serving.engine import EngineFullError, SamplingEngine
from lachesis.pipeline.inference.serving.results import GenerationResult
from lachesis.pipeline.inference.serving.sampling_notice import REQUESTED_SAMPLING
from lachesis.schemas.errors import DataError
from lachesis.schemas.values import from_json

__all__ = ["AccessGuard", "Handler", "answer", "body_of", "completed", "forbidden", "generated", "read_body"]

RETRY_AFTER_SECONDS = 1
BODY_S = 60.0
"""Seconds in which a request's body must have arrived."""
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Any]]


class AccessGuard:
    """An ASGI application that answers 401 to a request that lacks the key or the token it needs."""

    def __init__(self, app: ASGIApp, access: ServerAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            authorization = Headers(scope=scope).get("authorization", "")
            if (why := self._access.refusal(scope["path"], authorization)) is not None:
                app = _error(401, "AuthenticationError", DataError(why), {"WWW-Authenticate": "Bearer"})
        await app(scope, receive, send)


def answer(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Turn a handler's value into JSON, unless it is a response, and its errors into vLLM's error bodies."""

    async def endpoint(request: Request) -> Response:
        try:
            value = await handler(request)
            return value if isinstance(value, Response) else _json(value)
        except EngineFullError as error:
            return _error(503, "ServiceUnavailableError", error, {"Retry-After": str(RETRY_AFTER_SECONDS)})
        except InfrastructureError as error:
            return _error(503, "ServiceUnavailableError", error)
        except NotFoundError as error:
            return _error(404, "NotFoundError", error)
        except DataError as error:
            return _error(400, "BadRequestError", error)
        except ClientDisconnect:
            return Response(status_code=499)  # the client is gone; 499 is what proxies log

    return endpoint


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _error(status: int, kind: str, error: Exception, headers: dict[str, str] | None = None) -> Response:
    return _json({"error": {"message": str(error), "type": kind, "param": None, "code": status}}, status, headers)


def forbidden(why: str) -> Response:
    """Return the answer to a request that is not looked at."""
    return _error(403, "ForbiddenError", DataError(why))


async def body_of(request: Request, kind: type[T]) -> T:
    """Return the request's JSON as a `kind`; an empty body counts as an empty object. Raises `DataError`."""
    return from_json(f"{kind.__name__.lstrip('_')}", kind, await read_body(request) or b"{}")


async def read_body(request: Request) -> bytes:
    """Return the request's body. Raises `DataError` if it does not arrive in time.

    A body is refused as soon as it is longer than any sensible request, so its memory is bounded.
    """
    data = bytearray()
    with anyio.move_on_after(BODY_S) as within:
        async for part in request.stream():
            data += part
            if len(data) > MAX_BODY_BYTES:
                raise DataError(f"the body has more than {MAX_BODY_BYTES} bytes.")
    if within.cancelled_caught:
        raise DataError(f"the body did not arrive within {BODY_S:g} s.")
    return bytes(data)


async def generated(
    request: Request,
    engine: SamplingEngine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    branches: Sequence[PromptPath] = (),
) -> list[GenerationResult]:
    """Return what the engine samples after each prompt; a client that hangs up ends the work.

    `branches`: of the only prompt.

    Leaves the request's counts and trace data in its state. Raises as `SamplingEngine.submit`.
    """
    request.state.items = params.n * len(prompts)
    setattr(request.state, REQUESTED_SAMPLING, params)
    futures: list[Future[GenerationResult]] = []
    try:
        for prompt in prompts:
            futures.append(engine.submit(prompt, params, branches=branches))  # noqa: PERF401 - those before one that is refused are cancelled
        results = await _unless_disconnected(request, futures)
    finally:
        for future in futures:
            future.cancel()  # no effect on one that is done
    request.state.generation = GenerationResult.merge(results)
    request.state.input_tokens = sum(map(len, prompts)) + sum(len(path.own) for path in branches)
    return results


async def _unless_disconnected(request: Request, futures: Sequence[Future[T]]) -> list[T]:
    """As `completed` for several; all are also cancelled when the client hangs up."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        for future in futures:
            future.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        for future in futures:
            await _done(future)
        tasks.cancel_scope.cancel()
    return [_result(future) for future in futures]


async def completed(future: Future[T]) -> T:
    """Wait for a future of the engine's thread and return its result or raise its error."""
    await _done(future)
    return _result(future)


async def _done(future: Future[Any]) -> None:
    """Wait until the future is done; cancel it when this task is cancelled."""
    done = anyio.Event()
    loop = asyncio.get_running_loop()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    try:
        await done.wait()
    finally:
        future.cancel()  # no effect on a future that is done


def _result(future: Future[T]) -> T:
    if future.cancelled():
        raise ClientDisconnect
    return future.result()
