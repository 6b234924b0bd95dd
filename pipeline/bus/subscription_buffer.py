"""Broadcasts that wait for their listener, both in memory and from the server."""

from collections import deque
from collections.abc import AsyncIterator

import anyio

from lachesis.pipeline.bus.api import StoredMessage

__all__ = ["SubscriptionBuffer"]


class SubscriptionBuffer:
    """Broadcasts that wait for their listener; beyond `limit` the oldest are dropped."""

    def __init__(self, limit: int) -> None:
        self._unread: deque[StoredMessage] = deque(maxlen=limit)
        self._arrived = anyio.Event()
        self._failure: Exception | None = None

    def push(self, message: StoredMessage) -> None:
        self._unread.append(message)
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
        return self._unread.popleft()
