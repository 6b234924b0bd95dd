"""Requests with one answer, the services that answer them, and broadcasts. Nothing of it is stored."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.server_link import ServerLink, is_no_responder
from lachesis.pipeline.bus.subscription_buffer import SubscriptionBuffer
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import InfrastructureError, UnservedError
from lachesis.schemas.errors import DataError

__all__ = ["MicroClient", "broadcast", "listen", "request", "serve"]

_ERROR_CODE = "Nats-Service-Error-Code"  # the headers of the NATS micro protocol
_ERROR_TEXT = "Nats-Service-Error"
_BAD_REQUEST = "400"
_UNAVAILABLE = "503"
_MAX_UNANSWERED = 1024
_MAX_WAITING_BYTES = 16 << 20
"""Most that the requests may take that wait to be answered; a larger one waits alone."""


async def request(link: ServerLink, subject: str, data: bytes, timeout_s: float) -> bytes:
    """See `api.Bus.request`."""
    with anyio.move_on_after(timeout_s):
        await link.wait_up()
        msg = await link.request_once(subject, data, timeout_s=timeout_s)
        if msg is None:
            raise InfrastructureError(f"no answer on {subject} within {timeout_s} s, or the connection was lost")
        if is_no_responder(msg) and _ERROR_CODE not in (msg.headers or {}):
            raise UnservedError(f"no process serves {subject}")
        code, text = (msg.headers or {}).get(_ERROR_CODE), (msg.headers or {}).get(_ERROR_TEXT, "")
        if code == _BAD_REQUEST:
            raise DataError(text)
        if code is not None:
            raise InfrastructureError(f"{subject}: {text} ({code})")
        return bytes(msg.data)
    raise InfrastructureError(f"no answer on {subject} within {timeout_s} s")


@asynccontextmanager
async def serve(
    link: ServerLink, subject: str, handler: Callable[[bytes], Awaitable[bytes]], at_once: int
) -> AsyncIterator[None]:
    """See `api.Bus.serve`. Subjects of the NATS micro protocol (`$SRV.`) are answered by every replica."""
    requests, waiting = anyio.create_memory_object_stream[Msg](_MAX_UNANSWERED)
    refusals, refused = anyio.create_memory_object_stream[str](_MAX_UNANSWERED)
    waiting_bytes = 0

    def take(msg: Msg) -> None:
        nonlocal waiting_bytes
        if not link.may_answer(msg):
            return
        with suppress(anyio.WouldBlock):
            if not waiting_bytes or waiting_bytes + len(msg.data) <= _MAX_WAITING_BYTES:
                requests.send_nowait(msg)
                waiting_bytes += len(msg.data)
                return
        with suppress(anyio.WouldBlock):
            refusals.send_nowait(msg.reply)

    async def answer() -> None:
        nonlocal waiting_bytes
        async for msg in waiting:
            waiting_bytes -= len(msg.data)
            try:
                await link.send(msg.reply, await handler(msg.data))
            except (DataError, InfrastructureError) as error:
                link.check()
                code = _BAD_REQUEST if isinstance(error, DataError) else _UNAVAILABLE
                await link.send(msg.reply, headers={_ERROR_CODE: code, _ERROR_TEXT: str(error)})

    async def refuse() -> None:
        async for reply in refused:
            await link.send(reply, headers={_ERROR_CODE: _UNAVAILABLE, _ERROR_TEXT: "too many requests wait"})

    queue = "" if subject.startswith("$SRV.") else "q"
    with requests, waiting, refusals, refused:
        async with background() as tasks:
            for _ in range(at_once):
                tasks.start_soon(answer)
            tasks.start_soon(refuse)
            async with link.subscribed(subject, take, queue):
                yield


class MicroClient:
    """What nats-py's micro service needs of a client. Only requests that may be answered reach the service."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self._nuid = link.nc._nuid  # noqa: SLF001 - the micro service takes its id from there
        self.flush = link.nc.flush

    async def subscribe(self, subject: str, queue: str = "", *, cb: Callable[[Msg], Awaitable[None]]) -> Subscription:
        async def take(msg: Msg) -> None:
            if self._link.may_answer(msg):
                msg.headers = None  # the micro service would send them back, and the server may refuse their size
                await cb(msg)

        return await self._link.nc.subscribe(subject, queue=queue, cb=take)


async def broadcast(link: ServerLink, subject: str, data: bytes) -> None:
    """See `api.Bus.broadcast`."""
    await link.send(subject, data)


@asynccontextmanager
async def listen(link: ServerLink, subject: str, limit: int) -> AsyncIterator[AsyncIterator[StoredMessage]]:
    """See `api.Bus.listen`."""
    mailbox = SubscriptionBuffer(limit)

    def take(msg: Msg) -> None:
        mailbox.push(StoredMessage("", msg.subject, 0, msg.data, time.time_ns()))

    def look() -> None:
        if link.failure is not None:
            mailbox.fail(link.failure)

    link.observers.add(look)
    try:
        async with link.subscribed(subject, take):
            yield mailbox
    finally:
        link.observers.discard(look)
