"""Reads from a stream's leader, never from a replica that lags behind, to decide something by it.

A leader that is cut off from the others may give old answers for some seconds. So a task that decides by such a read
also commits with a fence: a commit needs most of the servers, and is refused if the answer was old.

"Not found" is not taken for granted. A server with a damaged store says 404 for a message that it cannot read, and
takes its subject for empty when a commit expects that. So `last` returns None only if the server also counts no message
on the subject; otherwise it raises `DamagedError`.
"""

import itertools
import math
from collections.abc import Awaitable, Callable

import anyio
import msgspec

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.replies import StreamInfo, StreamState, decode_answer, stored_message
from lachesis.pipeline.bus.server_link import ServerLink, backoff_s
from lachesis.pipeline.bus.server_waits import BELIEVE_LOSS_S
from lachesis.pipeline.errors import DamagedError, NotFoundError
from lachesis.schemas.subjects import run_of_stream

__all__ = [
    "BELIEVE_LOSS_S",
    "by_sequence",
    "damage",
    "found_or_counted",
    "last",
    "last_readable",
    "newest_that_reads",
    "state",
]

_BELIEVE_ABSENCE_S = 1.0
"""How long "404" and "there are some" must go on contradicting each other: the message may just have been stored."""


async def last(link: ServerLink, stream: str, subject: str, *, patient: bool = False) -> StoredMessage | None:
    """Return the last message on `subject`, which may hold wildcards. `patient`: wait without bound.

    None: there is none, because none was ever stored or all were deleted on purpose. Raises `DamagedError` when there
    are some and the newest cannot be read, `NotFoundError` when there is no such stream.
    """
    found, messages = await found_or_counted(
        lambda: _last_or_none(link, stream, subject, patient=patient),
        lambda: state(link, stream, subject, patient=patient),
        _BELIEVE_ABSENCE_S,
    )
    if found is None and messages:
        readable = await last_readable(link, stream, subject)
        raise DamagedError(damage(stream, subject, messages, readable.seq if readable else 0))
    return found


async def found_or_counted(
    find: Callable[[], Awaitable[StoredMessage | None]], count: Callable[[], Awaitable[StreamState]], believe_s: float
) -> tuple[StoredMessage | None, int]:
    """Return the message that `find` finds; or None, and how many messages the leader counts there.

    More than 0 only once the two have contradicted each other for `believe_s`, however late their answers were.
    """
    convinced_at = math.inf
    for attempt in itertools.count():
        found = await find()
        if found is not None:
            break
        messages = sum(((await count()).subjects or {}).values())
        if not messages or anyio.current_time() >= convinced_at:
            return None, messages
        convinced_at = min(convinced_at, anyio.current_time() + believe_s)
        await anyio.sleep(backoff_s(attempt))
    return found, 0


def damage(stream: str, subject: str, messages: int, readable: int) -> str:
    """Return what to say of a subject whose newest of `messages` cannot be read.

    `readable`: the newest that can.
    """
    upto = f"the newest that can be read is at sequence {readable}" if readable else "none of them can be read"
    return (
        f"stream {stream} is damaged: it counts {messages} messages on {subject}, but the server cannot read the "
        f"newest ({upto}). Nothing was written. Stop the server and restore its store from a backup; in a cluster let "
        f"another copy lead (`nats stream cluster step-down {stream}`) and have the damaged one made again; or "
        f"start the server again, and `lachesis runs recover {run_of_stream(stream) or 'RUN'}` makes the run "
        "go on with what can be read; or start a new run (a checkpoint's weights can be its `model`)"
    )


async def last_readable(link: ServerLink, stream: str, subject: str) -> StoredMessage | None:
    """Return the newest message on `subject` that the server can read, None without any.

    For damaged streams.
    """
    end = (await state(link, stream, subject)).last_seq
    return await newest_that_reads(end, lambda seq: _next(link, stream, subject, seq))


async def newest_that_reads(
    end: int, next_from: Callable[[int], Awaitable[StoredMessage | None]]
) -> StoredMessage | None:
    """Return the newest message up to sequence `end`.

    `next_from` finds the first at or after a sequence that reads.

    By halves: about log2(`end`) questions.
    """
    found, low = None, 1
    while low <= end:
        middle = (low + end + 1) // 2 if found else low
        message = await next_from(middle)
        if message is None:
            if found is None:
                return None
            end = middle - 1
        else:
            found, low = message, message.seq + 1
    return found


async def state(link: ServerLink, stream: str, subject: str | None = None, *, patient: bool = False) -> StreamState:
    """Return the stream's last sequence and the message count by subject, as the leader reports them.

    Of very many subjects the first are named. Raises `NotFoundError` when there is no such stream.
    """
    what = f"state of stream {stream}"
    body = msgspec.json.encode({"subjects_filter": subject}) if subject else b""
    msg = await link.call_raw(f"$JS.API.STREAM.INFO.{stream}", body, what=what, patient=patient)
    return decode_answer(StreamInfo, msg.data, what).state


async def by_sequence(link: ServerLink, stream: str, seq: int) -> StoredMessage:
    """Return the message at `seq`. Raises `NotFoundError`: it was deleted, or the server cannot read it."""
    return await _get(link, stream, {"seq": seq}, f"sequence {seq} of {stream}")


async def _last_or_none(link: ServerLink, stream: str, subject: str, *, patient: bool) -> StoredMessage | None:
    request: dict[str, str | int] = {"last_by_subj": subject}
    return await _found(_get(link, stream, request, f"last message on {subject}", patient=patient))


async def _next(link: ServerLink, stream: str, subject: str, seq: int) -> StoredMessage | None:
    request: dict[str, str | int] = {"seq": seq, "next_by_subj": subject}
    return await _found(_get(link, stream, request, f"message on {subject} from sequence {seq} on"))


async def _found(answer: Awaitable[StoredMessage]) -> StoredMessage | None:
    try:
        return await answer
    except NotFoundError as error:
        if "stream not found" in str(error):
            raise
        return None


async def _get(
    link: ServerLink, stream: str, request: dict[str, str | int], what: str, *, patient: bool = False
) -> StoredMessage:
    body = msgspec.json.encode(request)
    msg = await link.call_raw(f"$JS.API.STREAM.MSG.GET.{stream}", body, what=what, patient=patient)
    return stored_message(stream, msg.data, what)
