"""Reads that decide something: answered by the stream's leader alone, never by a replica that lags behind.

A leader cut off from the others may answer for some seconds what was true before. So whoever decides by one of these
also commits with a fence: a commit needs most of the servers, and is refused where the answer was an old one.
"""

import msgspec

from lachesis.pipeline.bus.answers import stored_message
from lachesis.pipeline.bus.api import Stored
from lachesis.pipeline.bus.link import Link
from lachesis.schemas.errors import NotFoundError

__all__ = ["by_sequence", "last"]


async def last(link: Link, stream: str, subject: str, *, patient: bool = False) -> Stored | None:
    """Return the last message on `subject`, which may hold wildcards, or None. `patient`: wait without bound.

    Raises `NotFoundError` when there is no such stream.
    """
    what = f"last message on {subject}"
    try:
        return await _get(link, stream, {"last_by_subj": subject}, what, patient=patient)
    except NotFoundError as error:
        if "stream not found" in str(error):
            raise
        return None


async def by_sequence(link: Link, stream: str, seq: int) -> Stored:
    """Return the message at `seq`. Raises `NotFoundError`."""
    return await _get(link, stream, {"seq": seq}, f"sequence {seq} of {stream}")


async def _get(link: Link, stream: str, request: dict[str, str | int], what: str, *, patient: bool = False) -> Stored:
    body = msgspec.json.encode(request)
    msg = await link.call_raw(f"$JS.API.STREAM.MSG.GET.{stream}", body, what=what, patient=patient)
    return stored_message(stream, msg.data, what)
