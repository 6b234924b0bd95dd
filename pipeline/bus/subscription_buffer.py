"""Keeps broadcasts until their listener reads them, bounded in number and in bytes.

Both kinds of bus use it.
"""

from collections import deque
from collections.abc import AsyncIterator

import anyio

from lachesis.pipeline.bus.api import StoredMessage

__all__ = ["SubscriptionBuffer"]


MAX_UNREAD_BYTES = 16 << 20
"""What a listener may leave unread; one larger message still comes, alone."""


class SubscriptionBuffer:
    """Broadcasts that wait for their listener; beyond `limit` of them or `MAX_UNREAD_BYTES` the oldest are dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._unread: deque[StoredMessage] = deque()
        self._bytes = 0
        self._arrived = anyio.Event()
        self._failure: Exception | None = None

    def push(self, message: StoredMessage) -> None:
        self._unread.append(message)
        self._bytes += len(message.data)
        while len(self._unread) > self._limit or (self._bytes > MAX_UNREAD_BYTES and len(self._unread) > 1):
            self._remove_oldest()
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Let the listener raise `error` once it has read what is there."""
        self._failure = error
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[StoredMessage]:
        return self

    async def __anext__(self) -> StoredMessage:
        await anyio.lowlevel.checkpoint_if_cancelled()
        while not self._unread:
            if self._failure is not None:
                raise self._failure
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._remove_oldest()

    def _remove_oldest(self) -> StoredMessage:
        message = self._unread.popleft()
        self._bytes -= len(message.data)
        return message
