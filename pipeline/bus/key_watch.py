"""Watches a key of the run's bucket: yields its value and each later one; of missed ones the newest.

The server announces each stored value, and the value is then read. That takes no consumer, so any number of processes
may watch, and none of them can use up the consumers that a bucket may have. Announcements are lost while the connection
is down, so the value is read again after each loss, and every few seconds.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from nats.aio.msg import Msg

from lachesis.pipeline.bus import kv
from lachesis.pipeline.bus.api import Entry
from lachesis.pipeline.bus.key_read import reads_by_key
from lachesis.pipeline.bus.publisher import Publisher
from lachesis.pipeline.bus.routing import check_key
from lachesis.pipeline.bus.server_link import ServerLink
from lachesis.pipeline.bus.server_waits import BELIEVE_LOSS_S
from lachesis.pipeline.errors import DamagedError, HistoryLostError, InfrastructureError
from lachesis.schemas.subjects import BUCKET, key_change, stream_name

__all__ = ["KeyWatch", "watch"]

log = logging.getLogger("lachesis")

_READ_AGAIN_S = 5.0
_RETRY_S = 0.5
_MAX_REPEATS = 4


class KeyWatch:
    """A key's values as they come. Iterating it waits for the next one for ever."""

    def __init__(self, link: ServerLink, publisher: Publisher, run: str, key: str) -> None:
        self._link = link
        self._publisher = publisher
        self._run = run
        self._key = key
        self._revision = 0
        self._older_since: float | None = None
        self._lags = reads_by_key(link, stream_name(run, BUCKET))
        """Whether a change may be said before the value can be read."""
        self._repeats = 0
        self._changed = anyio.Event()
        self._changed.set()

    def change(self) -> None:
        """Have the value read: it may have changed, or the link's state has."""
        self._changed.set()

    def on_message(self, _: Msg) -> None:
        self.change()

    def __aiter__(self) -> AsyncIterator[Entry]:
        return self

    async def __anext__(self) -> Entry:
        while True:
            with anyio.move_on_after(_READ_AGAIN_S):
                await self._changed.wait()
            is_due = self._changed.is_set()
            self._link.check()
            self._changed = anyio.Event()  # before reading: what is stored meanwhile is said again
            try:
                entry = await kv.value(self._publisher, self._run, self._key)
            except DamagedError as error:
                log.warning("what cannot be read is passed over: %s", error)
                continue
            except InfrastructureError:
                self._link.check()
                await anyio.sleep(_RETRY_S)
                self.change()
                continue
            if entry is not None and self._is_news(entry):
                self._repeats = 0
                return entry
            if is_due and self._lags and self._repeats < _MAX_REPEATS:
                self._repeats += 1
                await anyio.sleep(_RETRY_S)
                self.change()

    def _is_news(self, entry: Entry) -> bool:
        """Whether `entry` is newer than all before. Raises `HistoryLostError` where it stays older for long.

        A leader that was cut off may give old answers for some seconds.
        """
        if entry.revision >= self._revision:
            self._older_since = None
            news = entry.revision > self._revision
            self._revision = entry.revision
            return news
        now = anyio.current_time()
        self._older_since = self._older_since or now
        if now - self._older_since > BELIEVE_LOSS_S:
            raise HistoryLostError(
                f"key {self._key} of run {self._run}: its revision is {entry.revision}, but {self._revision} was "
                "read already: the broker lost history that it had acknowledged, or its store was replaced by an older "
                "one"
            )
        return False


@asynccontextmanager
async def watch(link: ServerLink, publisher: Publisher, run: str, key: str) -> AsyncIterator[KeyWatch]:
    """See `api.Bus.watch`."""
    check_key(key)
    values = KeyWatch(link, publisher, run, key)
    link.observers.add(values.change)
    try:
        async with link.subscribed(key_change(run, key), values.on_message):
            yield values
    finally:
        link.observers.discard(values.change)
