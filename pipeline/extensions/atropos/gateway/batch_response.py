"""Sends the last byte of a reply only once its receipt is stored.

The receipt says that the client is still connected and has all other bytes. Guarantees a receipt for each client that
got the whole reply, and none for a client that left earlier: a JSON body without its last byte is useless.
"""

import gzip
from typing import Protocol

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lachesis.pipeline.common.loopback import is_loopback

__all__ = ["BatchResponse", "zipped_for"]

_LEVEL = 1
"""Of gzip: the fastest, and a tenth larger than the default for token ids."""


async def zipped_for(request: Request, data: bytes) -> tuple[bytes, dict[str, str]]:
    """Return the body as the client of `request` takes it, and its headers.

    The event loop goes on meanwhile. For a client on this machine nothing is compressed: that takes both sides longer
    than the bytes take to travel.
    """
    is_near = request.client is not None and is_loopback(request.client.host)
    if is_near or "gzip" not in request.headers.get("accept-encoding", ""):
        return data, {"Content-Encoding": "identity"}  # set explicitly, so that no proxy changes the body
    return await anyio.to_thread.run_sync(gzip.compress, data, _LEVEL), {"Content-Encoding": "gzip"}


class ReceiptRecorder(Protocol):
    """Stores whether the reply was received, and returns whether that is stored."""

    async def __call__(self, *, received: bool) -> bool: ...


class BatchResponse(Response):
    """A JSON reply that calls `record_receipt` before its last byte."""

    def __init__(self, body: bytes, headers: dict[str, str], record_receipt: ReceiptRecorder) -> None:
        super().__init__(body, headers=headers, media_type="application/json")
        self._record_receipt = record_receipt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body[:-1], "more_body": True})
        # Where this returns early, the connection is closed, and a client sees that the reply is not whole.
        if await Request(scope, receive).is_disconnected() or not await self._record_receipt(received=True):
            return
        if await Request(scope, receive).is_disconnected():  # it left while that was stored
            await self._record_receipt(received=False)
            return
        await send({"type": "http.response.body", "body": self.body[-1:], "more_body": False})
