"""Explains to people why the server does not answer a request, by querying the server itself.

Guarantees an answer within twice `DIAGNOSIS_S`, whatever is silent. Reports "no such stream" only if a server that can
know has said so: in a cluster without a leader no server answers for a stream, though the stream exists.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
from nats.aio.msg import Msg

from lachesis.pipeline.bus.addresses import host_and_port, parse_address, split_addresses
from lachesis.pipeline.bus.replies import MISSING_HINT, NO_LEADER, STREAM_NOT_FOUND, error_in, has_quorum

if TYPE_CHECKING:
    from lachesis.pipeline.bus.server_link import ServerLink

__all__ = ["DIAGNOSIS_S", "explain", "servers_away", "try_stream_info"]

DIAGNOSIS_S = 1.5
"""Most that each question to the server, and trying every configured address, may take, seconds."""
_KEPT_S = 2.0
"""Seconds before an explanation is requested again: many waits have the same reason."""
_LEADERLESS_S = 0.3
"""Seconds that a stream's own leader still has to answer, once the server has said that its JetStream has none."""


async def explain(link: "ServerLink", stream: str) -> str:
    """Return why nothing of `stream` is answered, as far as can be known now."""
    now = anyio.current_time()
    known = link.explanations.get(stream)
    if known is not None and now - known[0] < _KEPT_S:
        return known[1]
    link.explanations[stream] = (now, known[1] if known else "no answer")  # others need not ask meanwhile
    text = await _explain(link, stream)
    link.explanations[stream] = (anyio.current_time(), text)
    return text


async def _explain(link: "ServerLink", stream: str) -> str:
    if not link.is_up:
        return f"not connected: {link.last_error or 'the server is unavailable'}{await _away(link)}"
    described, msg = await _request_both(link, stream)
    if described is not None:
        return await _read(link, stream, described)
    if msg is None:
        return f"{link.server_name} takes connections and does not answer{await _away(link)}"
    if _is_leaderless(msg):
        return f"JetStream at {link.server_name} has no leader, so nothing can be stored or read{await _away(link)}"
    what = stream or "this"
    return f"JetStream answers at {link.server_name}, but not for {what}: it has no leader{await _away(link)}"


async def _request_both(link: "ServerLink", stream: str) -> tuple[bytes | None, Msg | None]:
    """Return what the server says of a stream and of its JetStream, queried at once; None: nothing within
    `DIAGNOSIS_S`.

    A server without a leader says that of its JetStream at once, and leaves the other question unanswered.
    """
    described: bytes | None = None
    msg: Msg | None = None
    with anyio.move_on_after(DIAGNOSIS_S) as patience:
        async with anyio.create_task_group() as tasks:

            async def request_stream() -> None:
                nonlocal described
                described = await try_stream_info(link, stream, timeout_s=DIAGNOSIS_S)
                if described is not None:
                    tasks.cancel_scope.cancel()

            tasks.start_soon(request_stream)
            msg = await link.request_once("$JS.API.INFO", b"", timeout_s=DIAGNOSIS_S)
            if msg is not None and _is_leaderless(msg):
                patience.deadline = min(patience.deadline, anyio.current_time() + _LEADERLESS_S)
    return described, msg


def _is_leaderless(msg: Msg) -> bool:
    error = error_in(msg.data)
    return not msg.data or (error is not None and error.err_code == NO_LEADER)  # empty: no server serves this subject


async def try_stream_info(link: "ServerLink", stream: str, *, timeout_s: float) -> bytes | None:
    """Return what `STREAM.INFO` says of a stream; None where nothing comes, or this identity may not ask."""
    subject = f"$JS.API.STREAM.INFO.{stream}"
    link.optional.add(subject)
    if not stream or subject in link.refused:
        return None
    msg = await link.request_once(subject, b"", timeout_s=timeout_s)
    return msg.data or None if msg is not None else None


async def _read(link: "ServerLink", stream: str, data: bytes) -> str:
    """Return what the server's description of a stream means for a wait for it."""
    error = error_in(data)
    if error is not None and error.err_code == STREAM_NOT_FOUND:
        return f"there is no stream {stream}{MISSING_HINT}"
    if error is not None and error.err_code != NO_LEADER:
        return error.description
    if has_quorum(data) is False:
        return f"{stream} has no leader, so nothing of it can be stored or read{await _away(link)}"
    return (
        f"{link.server_name} answers for {stream}, but leaves this unanswered: its disk is or was full or broken; once "
        "that is mended, a server that is not the run's own has to be restarted"
    )


async def _away(link: "ServerLink") -> str:
    """Return how many of several configured servers take no connection, as the end of a sentence."""
    addresses = [host_and_port(parse_address(one)) for one in split_addresses(link.config.url)]
    if len(addresses) < 2:
        return ""
    away = await servers_away(addresses)
    if not away:
        return f" ({len(addresses)} of {len(addresses)} servers take connections; they may be cut off from one another)"
    return f" ({len(away)} of {len(addresses)} servers away: {', '.join(f'{host}:{port}' for host, port in away)})"


async def servers_away(addresses: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return which of the addresses take no connection within `DIAGNOSIS_S`."""
    reached: set[tuple[str, int]] = set()

    async def reach(address: tuple[str, int]) -> None:
        with suppress(OSError):
            async with await anyio.connect_tcp(*address):
                reached.add(address)

    with anyio.move_on_after(DIAGNOSIS_S):
        async with anyio.create_task_group() as tasks:
            for address in addresses:
                tasks.start_soon(reach, address)
    return [address for address in addresses if address not in reached]
