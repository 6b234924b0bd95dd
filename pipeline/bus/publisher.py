"""Stores messages within a window of bytes and messages, with stable ids and an optional fence.

Guarantees that `store` returns only what the server acknowledged and sends again, under the same message id, whatever
it did not; and that `commit` never takes its own message for another writer's, nor the other way round.
"""

import itertools
from collections.abc import Mapping

import anyio

from lachesis.pipeline.bus import leader
from lachesis.pipeline.bus.api import PubAck, StoredMessage
from lachesis.pipeline.bus.diagnosis import explain
from lachesis.pipeline.bus.key_read import last_of_key, reads_by_key
from lachesis.pipeline.bus.replies import error_in, to_pub_ack
from lachesis.pipeline.bus.routing import MSG_ID_HEADER, stored_in
from lachesis.pipeline.bus.server_link import ServerLink, backoff_s, is_no_responder, patience_s
from lachesis.pipeline.bus.server_waits import ServerWait
from lachesis.pipeline.bus.window import InFlightWindow
from lachesis.pipeline.errors import FencedError, HistoryLostError, InfrastructureError
from lachesis.schemas.errors import LachesisError
from lachesis.schemas.subjects import BUCKET, kind_of, stream_name

__all__ = ["EXPECTED_HEADER", "Publisher"]

EXPECTED_HEADER = "Nats-Expected-Last-Subject-Sequence"
_OVERHEAD_BYTES = 256


class Publisher:
    """Publishes over one link. Any number of tasks may publish at once; the window bounds them together."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self._window = InFlightWindow(link.config.window_bytes, link.config.window_messages)

    async def store(self, subject: str, data: bytes, headers: Mapping[str, str]) -> PubAck:
        """Publish until the server has acknowledged it. `headers` hold the message id.

        Silence and lost connections are waited out without bound. A refusal that may pass (no stream or no leader yet)
        is waited out for `give_up_s`, then raised as `InfrastructureError`; others are raised at once, as is
        `HistoryLostError` where the stream stored it in the place of what it had acknowledged before.
        """
        size = len(data) + _OVERHEAD_BYTES
        await self._window.enter(size)
        try:
            return await self._until_stored(subject, data, headers)
        finally:
            self._window.release(size)

    async def _until_stored(self, subject: str, data: bytes, headers: Mapping[str, str]) -> PubAck:
        stream = _stream_behind(subject)
        kind = kind_of(stream)
        kept = stream == stream_name(self._link.run, kind)
        after = self._link.acknowledged.newest.get(kind, 0)
        with self._link.waits.waiting(f"publish {subject}", stream) as wait:
            refused_since: float | None = None
            attempt = silent = 0
            while True:
                await self._link.wait_up()
                wait_s = patience_s(silent, self._link.config.ack_timeout_s)
                msg = await self._link.request_once(subject, data, headers=headers, timeout_s=wait_s)
                if msg is None:  # the connection was lost, or the answer, or the leader that would have given it
                    silent += 1
                    refused_since = None
                    await self._link.explain_wait(wait, stream, None)
                    await anyio.sleep(backoff_s(0))
                    continue
                error = error_in(msg.data)
                if error is None and not is_no_responder(msg):
                    ack = to_pub_ack(msg.data, subject)
                    if kept:
                        self._link.acknowledged.record(ack, headers[MSG_ID_HEADER], after=after)
                    return ack
                if error is not None and not error.is_transient:
                    wait.reason = f"refused: {error.description}"
                    raise error.to_exception(subject)
                now = anyio.current_time()
                refused_since = refused_since or now
                await self._link.explain_wait(wait, stream, error.description if error else None)
                if now - refused_since > self._link.config.give_up_s:
                    wait.reason = await explain(self._link, stream)
                    raise InfrastructureError(
                        f"{subject}: refused for {self._link.config.give_up_s:g} s: {wait.reason}"
                    )
                await anyio.sleep(backoff_s(attempt))
                attempt += 1

    async def commit(self, stream: str, subject: str, data: bytes, *, expected: int, headers: Mapping[str, str]) -> int:
        """Store `data` if the subject's last sequence is `expected`; return its sequence.

        Raises `FencedError`, and `HistoryLostError` where the server goes on knowing of less than it had acknowledged:
        a leader that was cut off does so for some seconds, until another one leads.
        """
        fenced = {**headers, EXPECTED_HEADER: str(expected)}
        believed_at = anyio.current_time() + leader.BELIEVE_LOSS_S
        wait: ServerWait | None = None  # only from the first doubt on: `store` has a wait of its own, with its reason
        try:
            for attempt in itertools.count():
                try:
                    ack: PubAck | None = await self.store(subject, data, fenced)
                except FencedError:
                    ack = None
                if ack is not None and not ack.duplicate:
                    return ack.seq
                # An earlier attempt of ours may have been stored without its acknowledgement reaching us. What the
                # server takes for a duplicate is looked at as well: ids are the stream's, and others may write in it.
                last = await self.last(stream, subject, patient=True)
                if last is not None and last.headers.get(MSG_ID_HEADER) == headers[MSG_ID_HEADER]:
                    return last.seq
                found = 0 if last is None else last.seq
                deleted = found == 0 and kind_of(stream) == BUCKET
                if found > expected or deleted or anyio.current_time() >= believed_at:
                    break
                # A leader that was cut off may have refused it, or answered: it knows of less than the others stored.
                wait = wait or self._link.waits.begin(f"commit {subject}", stream)
                wait.reason = f"the server knows of its messages up to sequence {found}, and {expected} was stored"
                await anyio.sleep(backoff_s(attempt))
        finally:
            if wait is not None:
                self._link.waits.end(wait)
        raise self._refusal(stream, subject, expected, found, duplicate=ack is not None)

    def _refusal(self, stream: str, subject: str, expected: int, found: int, *, duplicate: bool) -> LachesisError:
        """Return why a commit was refused for good: `found` is the subject's last sequence. Copies of keys may lag."""
        if found == 0 and expected:
            return FencedError(f"{subject}: nothing is left there, and {expected} was the last: it was deleted")
        if found < expected and not reads_by_key(self._link, stream):
            return HistoryLostError(
                f"{subject}: last sequence is {found}, but {expected} was stored: the broker lost history that it had "
                "acknowledged, or its store was replaced by an older one"
            )
        if duplicate and found == expected:
            return FencedError(f"{subject}: another key of the stream has used up the id of this commit: start again")
        return FencedError(f"{subject}: last sequence is {found}, not {expected}; another writer has taken over")

    async def append(self, stream: str, subject: str, data: bytes, *, after: int, headers: Mapping[str, str]) -> int:
        """As `commit`, for a subject that one process alone writes.

        Any server may say what lies on it last, and no right to read the stream is needed. Raises `FencedError`, also
        where it is not sure.
        """
        try:
            return (await self.store(subject, data, {**headers, EXPECTED_HEADER: str(after)})).seq
        except FencedError:
            msg = await self._link.request_once(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"")
            found = (msg.headers if msg is not None else None) or {}
            if found.get(MSG_ID_HEADER) != headers[MSG_ID_HEADER]:
                raise
            return int(found["Nats-Sequence"])

    async def last(self, stream: str, subject: str, *, patient: bool = False) -> StoredMessage | None:
        """Return the subject's last message, read from the stream's leader if the identity may query it."""
        if reads_by_key(self._link, stream):
            return await last_of_key(self._link, stream, subject, patient=patient)
        return await leader.last(self._link, stream, subject, patient=patient)


def _stream_behind(subject: str) -> str:
    """Return the server's name of the stream that stores `subject`, or the key ($KV.<bucket>.<key>)."""
    tokens = subject.split(".", 2)
    return f"KV_{tokens[1]}" if tokens[0] == "$KV" else stored_in(subject)
