"""Fetching messages by sequence, in the requested order.

Direct gets, several outstanding, or many with one request.
"""

import itertools
from collections import deque
from collections.abc import AsyncGenerator, Sequence

import anyio
import msgspec

from lachesis.pipeline.bus import leader
from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.blobs import INLINE_BYTES
from lachesis.pipeline.bus.pending_requests import PendingRequest
from lachesis.pipeline.bus.replies import direct_message
from lachesis.pipeline.bus.server_link import ServerLink, patience_s

__all__ = ["DirectGetter"]

_MAX_OUTSTANDING = 32
_BUDGET_BYTES = 16 << 20


class DirectGetter:
    """Reads single messages, first from whichever server is near, then, where that has none, from the leader."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self._patience_s = patience_s(0, link.config.ack_timeout_s)

    async def fetch(self, stream: str, seqs: Sequence[int]) -> AsyncGenerator[StoredMessage]:
        """Yield the messages at `seqs` as stored (large ones as heads). Raises `NotFoundError`."""
        asked: deque[tuple[int, PendingRequest, float]] = deque()
        heard = 0.0  # when the last answer came: requests that were sent and lost together are not waited for in turn
        largest = INLINE_BYTES  # until sizes are known, assume the worst
        remaining = iter(seqs)
        try:
            while True:
                room = max(1, min(_MAX_OUTSTANDING, _BUDGET_BYTES // max(largest, 1)))
                for seq in itertools.islice(remaining, max(0, room - len(asked))):
                    question = await self._link.post(f"$JS.API.DIRECT.GET.{stream}", _by_seq(seq))
                    asked.append((seq, question, anyio.current_time()))
                if not asked:
                    return
                seq, question, sent = asked.popleft()
                wait_s = max(sent, heard) + self._patience_s - anyio.current_time()
                msg = await self._link.settle(question, max(0.0, wait_s))
                heard = heard if msg is None else anyio.current_time()
                message = direct_message(stream, msg)
                if message is None:
                    message = await self._again(stream, seq)
                    largest = INLINE_BYTES
                else:
                    largest = max(largest * 3 // 4, len(message.data), 1)
                yield message
        finally:
            for _, question, _ in asked:
                self._link.drop(question)

    async def fetch_among(self, stream: str, seqs: Sequence[int], subject: str) -> AsyncGenerator[StoredMessage]:
        """As `fetch`, of rising `seqs` on `subject`, many with one request.

        What else lies on it between them is read as well and passed over.
        """
        wanted = deque(seqs)
        while wanted:
            asked = len(wanted)
            async with self._link.series(f"$JS.API.DIRECT.GET.{stream}", _many(wanted, subject)) as answers:
                while wanted:
                    message = direct_message(stream, await answers.next(self._patience_s))
                    if message is None or message.seq > wanted[0]:
                        break  # that was all, or it is not there
                    if message.seq == wanted[0]:
                        wanted.popleft()
                        yield message
            if len(wanted) == asked:
                yield await self._again(stream, wanted.popleft())

    async def get(self, stream: str, seq: int) -> StoredMessage:
        """Return the message at `seq` as stored. Raises `NotFoundError`."""
        subject = f"$JS.API.DIRECT.GET.{stream}"
        msg = (
            await self._link.request_once(subject, _by_seq(seq), timeout_s=self._patience_s)
            if self._link.is_up
            else None
        )
        return direct_message(stream, msg) or await self._again(stream, seq)

    async def _again(self, stream: str, seq: int) -> StoredMessage:
        # a replica may not have it yet, it or the connection may have been lost: the leader knows
        return await leader.by_sequence(self._link, stream, seq)


def _by_seq(seq: int) -> bytes:
    return msgspec.json.encode({"seq": seq})


def _many(seqs: Sequence[int], subject: str) -> bytes:
    return msgspec.json.encode(
        {"seq": seqs[0], "batch": len(seqs), "next_by_subj": subject, "max_bytes": _BUDGET_BYTES // 4}
    )
