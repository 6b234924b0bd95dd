"""Bounds what is in flight, in bytes and in messages: published, read ahead or being worked on."""

from collections import deque

import anyio

__all__ = ["InFlightWindow"]


class InFlightWindow:
    """Room for so many bytes and messages in flight, granted in the order of the requests.

    A message larger than the whole window goes alone.
    """

    def __init__(self, max_bytes: int, max_messages: int) -> None:
        self._max_bytes = max_bytes
        self._max_messages = max_messages
        self._queue: deque[tuple[int, anyio.Event]] = deque()
        self.bytes = 0
        self.messages = 0

    def _fits(self, size: int) -> bool:
        if not self.messages:
            return True
        return self.messages < self._max_messages and self.bytes + size <= self._max_bytes

    async def enter(self, size: int) -> None:
        """Wait for room and take it; each `enter` that returns needs one `release`."""
        if not self._queue and self._fits(size):
            self._acquire(size)
            return
        turn = (size, anyio.Event())
        self._queue.append(turn)
        try:
            await turn[1].wait()
        except BaseException:
            if turn[1].is_set():  # it was given room as it was cancelled
                self.release(size)
            else:
                self._queue.remove(turn)
                self._admit()
            raise

    def _acquire(self, size: int) -> None:
        self.bytes += size
        self.messages += 1

    def release(self, size: int) -> None:
        """Give room back to the task that has waited longest."""
        self.bytes -= size
        self.messages -= 1
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._fits(self._queue[0][0]):
            size, turn = self._queue.popleft()
            self._acquire(size)
            turn.set()
