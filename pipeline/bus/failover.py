"""Leaves a server that is cut off from its cluster, and returns to it once it serves again.

Guarantees that a connection moves only to a server at which JetStream and the stream that is waited for have been seen
to answer, and never while the server it is on answers for that stream: a full disk, a single server or a cluster
without a quorum move nothing. Requests under way are sent again, and messages are published again under the same
message id.
"""

import logging
import random
from collections.abc import Awaitable, Callable
from urllib.parse import ParseResult

import anyio

from lachesis.pipeline.bus.diagnosis import explain, try_stream_info
from lachesis.pipeline.bus.replies import error_in, has_quorum
from lachesis.pipeline.bus.server_link import ServerLink, is_no_responder
from lachesis.pipeline.bus.server_waits import ServerWait
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.schemas.subjects import LEDGER, stream_name

__all__ = ["LEAVE_AFTER_S", "Failover"]

log = logging.getLogger("lachesis")

LEAVE_AFTER_S = 5.0
"""A wait for the server that lasts longer has the server examined, and left if it is cut off. Electing a new leader
takes 4 to 6 s, and asking the other servers sooner would only burden them."""
_PROBE_INTERVAL_S = (0.5, 1.5)
_ALONE_INTERVAL_S = 1.0
_ASK_INTERVAL_S = (3.0, 5.0)  # between two questions whether the server serves, though nothing waits for it
_PROBE_S = 3.0
_ANSWER_S = 1.0
_NO_SERVER_PAUSE_S = (2.0, 4.0)  # pause before the other servers are tried again, when none of them served
_HOME_INTERVAL_S = (10.0, 20.0)  # between two probes of the server that was left; random, so that connections spread
_HOME_PROBES = 2
_MAX_PAUSE_FACTOR = 16

Dial = Callable[[str], Awaitable[ServerLink | None]]
"""Connects to one server with the same credentials; None: that failed."""


class Failover:
    """Watches one connection. `home` is the address that it belongs to, so that all connections are spread evenly;
    None: any address will do."""

    def __init__(self, link: ServerLink, dial: Dial, home: ParseResult | None) -> None:
        self._link = link
        self._dial = dial
        self._home = home
        self._probed_stream = stream_name(link.run, LEDGER)
        self._home_seen = 0  # how often in a row the home has been seen to serve
        self._home_due_s = 0.0
        self._left = 0  # how often a server was found to be cut off
        self._ask_others_s = 0.0
        self._ask_s = 0.0
        self._unserved: ServerWait | None = None

    async def run(self) -> None:
        """Watch until cancelled, or until the connection has failed for good."""
        try:
            while self._link.failure is None:
                await self._pause()
                if not self._link.is_up:
                    continue  # the client is looking for a server already
                await self._ask_whether_served()
                stall = self._link.waits.stall
                if stall is None:
                    await self._return_home()
                elif stall.seconds >= LEAVE_AFTER_S:
                    await self._leave(stall.stream)
        finally:
            self._end_unserved()  # no loop would notice any more that the server serves again

    async def _pause(self) -> None:
        if len(self._link.nc.servers) < 2:
            await sleep_until_tick(_ALONE_INTERVAL_S)  # there is nothing to probe, so nothing to spread
        else:
            await anyio.sleep(random.uniform(*_PROBE_INTERVAL_S))

    async def _ask_whether_served(self) -> None:
        """Count it as a wait if the server does not serve: tasks that only read or listen there receive nothing, and
        waits for no answer."""
        if anyio.current_time() < self._ask_s or len(self._link.nc.servers) < 2:
            return
        self._ask_s = anyio.current_time() + random.uniform(*_ASK_INTERVAL_S)
        if await _serves(self._link, self._probed_stream):
            self._end_unserved()
            return
        if self._unserved is None:
            self._unserved = self._link.waits.begin(self._link.server_name, self._probed_stream)
        self._unserved.reason = await explain(self._link, self._probed_stream)
        self._ask_s = 0.0  # at the next look: it may have been busy for a moment

    def _end_unserved(self) -> None:
        if self._unserved is not None:
            self._link.waits.end(self._unserved)
        self._unserved = None

    async def _leave(self, stream: str) -> None:
        """Go to a server that answers for `stream`, if this one does not and another does."""
        if anyio.current_time() < self._ask_others_s or await _serves(self._link, stream):
            return
        for server in self._others():
            if await self._is_served_at(server, stream):
                log.warning(
                    "%s is cut off from its cluster: nothing answers for %s there; going to %s, where it does",
                    self._link.server_name,
                    stream or "JetStream",
                    _address(server),
                )
                self._left += 1
                self._look_home_later()
                await self._link.nc.move_to(server)
                return
        self._ask_others_s = anyio.current_time() + random.uniform(*_NO_SERVER_PAUSE_S)

    async def _return_home(self) -> None:
        """Go back to the home once it has served for a while; the time is random, so that not all go at once."""
        if self._home is None or _address(self._home) == self._link.server_name:
            return
        if anyio.current_time() < self._home_due_s:
            return
        if not self._home_due_s:
            self._look_home_later()
            return
        serves = await self._is_served_at(self._home, self._probed_stream)
        self._home_seen = self._home_seen + 1 if serves else 0
        if self._home_seen >= _HOME_PROBES and self._link.waits.stall is None:
            log.info("%s serves again; going back there from %s", _address(self._home), self._link.server_name)
            self._home_due_s = 0.0
            await self._link.nc.move_to(self._home)
        else:
            self._look_home_later(again=serves)

    def _look_home_later(self, *, again: bool = False) -> None:
        if not again:
            self._home_seen = 0
        pause_factor = min(2 ** max(0, self._left - 1), _MAX_PAUSE_FACTOR)  # a server that comes and goes is left alone
        self._home_due_s = anyio.current_time() + pause_factor * random.uniform(*_HOME_INTERVAL_S)

    def _others(self) -> list[ParseResult]:
        """Return the addresses of all other servers that are known, in random order."""
        here = self._link.server_name
        found = [server for server in self._link.nc.servers if _address(server) != here]
        random.shuffle(found)
        return found

    async def _is_served_at(self, server: ParseResult, stream: str) -> bool:
        """Whether another server serves `stream`; it is queried over a connection of its own."""
        with anyio.move_on_after(_PROBE_S):
            probe = await self._dial(self._url(server))
            if probe is None:
                return False
            try:
                same = probe.nc.server_id == self._link.nc.server_id
                return not same and await _serves(probe, stream)
            finally:
                await probe.close()
        return False

    def _url(self, server: ParseResult) -> str:
        """Return a server's address with user and password, which one that was discovered lacks."""
        login = next((known.netloc.rpartition("@")[0] for known in self._link.nc.servers if known.username), "")
        netloc = server.netloc if server.username or not login else f"{login}@{server.netloc}"
        return server._replace(netloc=netloc).geturl()


async def _serves(link: ServerLink, stream: str) -> bool:
    """Whether JetStream and `stream` are served at the server of a connection: somebody who can know answers."""
    described = await try_stream_info(link, stream, timeout_s=_ANSWER_S)
    if described is not None and (found := has_quorum(described)) is not None:
        return found
    msg = await link.request_once("$JS.API.INFO", b"", timeout_s=_ANSWER_S)
    return msg is not None and not is_no_responder(msg) and error_in(msg.data) is None


def _address(server: ParseResult) -> str:
    return f"{server.hostname}:{server.port}"
