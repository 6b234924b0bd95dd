"""Reads one key of the bucket by its subject, for identities that may read no others.

The server cannot restrict queries of a stream's leader: an identity that may send them may read any message. It can
grant direct gets of single subjects, which any server with a copy answers. Such an answer may lag behind, so it decides
nothing by itself: changes are fenced, and followers of a key read it again. "Not found" is believed only if the leader
counts no message on the subject.
"""

import itertools

import anyio

from lachesis.pipeline.bus import leader
from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.permissions import identity_in
from lachesis.pipeline.bus.replies import direct_message
from lachesis.pipeline.bus.server_link import ServerLink, backoff_s, patience_s, status_of
from lachesis.pipeline.errors import DamagedError, InfrastructureError
from lachesis.schemas.subjects import BUCKET, ENVIRONMENT, stream_name

__all__ = ["last_of_key", "reads_by_key"]

_BELIEVE_ABSENCE_S = 10.0
"""How long "404" and "there is one" must go on contradicting each other: a copy may lag behind."""
_NOT_FOUND = "404"


def reads_by_key(link: ServerLink, stream: str) -> bool:
    """Whether `stream` is the bucket, of which this process may read single keys alone."""
    identity = identity_in(link.config.inbox_prefix) or ""
    return stream == stream_name(link.run, BUCKET) and identity.startswith(f"{ENVIRONMENT}-")


async def last_of_key(link: ServerLink, stream: str, subject: str, *, patient: bool = False) -> StoredMessage | None:
    """Return the message on a key's subject, None without any. `patient`: wait without bound.

    Raises `DamagedError` when there is one and it cannot be read.
    """
    found, messages = await leader.found_or_counted(
        lambda: _request(link, stream, subject, patient=patient),
        lambda: leader.state(link, stream, subject, patient=patient),
        _BELIEVE_ABSENCE_S,
    )
    if found is None and messages:
        raise DamagedError(leader.damage(stream, subject, messages, 0))
    return found


async def _request(link: ServerLink, stream: str, subject: str, *, patient: bool) -> StoredMessage | None:
    """Return what one server has. The answer is the stored message: nothing of its data is taken for an error."""
    what, give_up_s = f"last message on {subject}", link.config.give_up_s
    with link.waits.waiting(what, stream) as wait:
        with anyio.move_on_after(None if patient else give_up_s):
            for attempt in itertools.count():
                await link.wait_up()
                msg = await link.request_once(
                    f"$JS.API.DIRECT.GET.{stream}.{subject}",
                    b"",
                    timeout_s=patience_s(attempt, link.config.ack_timeout_s),
                )
                if msg is not None and status_of(msg) == _NOT_FOUND:
                    return None
                if (found := direct_message(stream, msg)) is not None:
                    return found
                await link.explain_wait(wait, stream, None)
                await anyio.sleep(backoff_s(attempt))
        raise InfrastructureError(f"{what}: {wait.reason}, for {give_up_s:g} s")
