"""Pulls continuously from one consumer.

The pull is bounded in messages and bytes, and survives restarts of the server.

One request is open at a time, for as many messages as there is room for. Its heartbeats distinguish a quiet stream from
a lost request. A pull that gathers asks for what is there instead, and after that waits: messages that come together
cost less than lone ones. While nothing is there, it has a request for one message open, so that it need not ask again
and again. Messages are queued for the owner of the pull; `release` makes room for more.
"""

import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from lachesis.pipeline.bus.server_link import ServerLink, backoff_s, status_of
from lachesis.pipeline.common.ticks import seconds_to_tick
from lachesis.pipeline.errors import AccessError, InfrastructureError

__all__ = ["AckMetadata", "ConsumerPull", "weight"]

_HEARTBEAT_S = 2.0  # two missing ones, and the consumer is taken to be gone with its server
_EXPIRES_S = 20.0  # and to the next full second, so that the next request is made, and its heartbeats come, at a tick
_NS = 1_000_000_000
_HEADER_ALLOWANCE = 256
_UNSENT_HEADER = "Nats-Pending-Messages"


def weight(msg: Msg) -> int:
    """Return what a message counts against a byte bound, about what the server counts."""
    return len(msg.data) + _HEADER_ALLOWANCE


class AckMetadata(msgspec.Struct, frozen=True):
    """What the acknowledgement subject of a delivered message says."""

    consumer: str
    attempt: int
    seq: int
    consumer_seq: int
    time_ns: int
    pending: int

    @classmethod
    def of(cls, msg: Msg) -> "AckMetadata":
        # $JS.ACK.<stream>.<consumer>.<attempt>.<seq>.<consumer seq>.<time>.<pending>, newer servers may put a domain
        # and an account before the stream and a token at the end
        parts = msg.reply.split(".")
        first = 2 if len(parts) == 9 else 4
        attempt, seq, consumer_seq, time_ns, pending = map(int, parts[first + 2 : first + 7])
        return cls(parts[first + 1], attempt, seq, consumer_seq, time_ns, pending)


class ConsumerPull:
    """`ensure` creates the consumer if need be and returns its name; it is called at start and after each loss.

    `accept` looks at each message as it arrives and says whether to queue it. `gather_s`: how long to wait once nothing
    more is there, seconds; 0: each message comes at once. `run` must run in a task.
    """

    def __init__(
        self,
        link: ServerLink,
        stream: str,
        *,
        ensure: Callable[[], Awaitable[str]],
        accept: Callable[[Msg], bool],
        max_messages: int,
        max_bytes: int | None,
        gather_s: float = 0.0,
    ) -> None:
        self.queue: deque[Msg] = deque()
        self.idle = False
        """Whether the last request ended because nothing more was there."""
        self._link = link
        self._stream = stream
        self._ensure = ensure
        self._accept = accept
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._gather_s = gather_s
        self._pause_until = 0.0
        self._gathers = gather_s > 0  # whether the next request is for what is there; else it waits for a message
        self._is_empty = True  # the open request has brought nothing so far
        self._held_messages = 0  # queued, or handed out and not released
        self._held_bytes = 0
        self._requested = 0  # what the open request may still bring; 0: none is open
        self._too_small: int | None = None  # a request of so many bytes was refused: the next message is larger
        self._lost = False
        self._inbox = link.nc.new_inbox()
        self._number = itertools.count()
        self._current = ""
        self._heard = 0.0
        self._stir = anyio.Event()
        self._arrived = anyio.Event()
        self._sub: Subscription | None = None

    async def first(self) -> Msg:
        """Return the oldest queued message once there is one. The caller has to `release` its room."""
        while not self.queue:
            await self.wait()
        return self.queue[0]

    async def room_for(self, size: int) -> None:
        """Wait until the first queued message may come to weigh `size` more: there is room, or it is alone."""
        while self._max_bytes is not None and self._held_bytes + size > self._max_bytes:
            if self._held_messages == len(self.queue):
                return  # nothing is handed out that could still be released
            await self.wait()

    def hold(self, size: int) -> None:
        """Take room beyond what a message brought with it; it goes with that message's `release`."""
        self._held_bytes += size

    async def wait(self) -> None:
        """Wait until something arrives or changes. Raises the link's failure."""
        self._link.check()
        self._arrived = anyio.Event()
        await self._arrived.wait()
        self._link.check()

    def release(self, size: int) -> None:
        """Give back the room of one message that weighed `size`."""
        self._held_messages -= 1
        self._held_bytes -= size
        self._arrived.set()
        if not self._requested:
            self._stir.set()

    def recreate(self) -> None:
        """Start over with `ensure`: the consumer is gone or has skipped something."""
        self._lost = True
        self._stir.set()

    def wake(self) -> None:
        """Wake the waiting tasks and `run`."""
        self._stir.set()
        self._arrived.set()

    async def stop(self) -> None:
        """End the subscription, after what the server has already sent has arrived."""
        self._link.observers.discard(self.wake)
        if self._sub is None:
            return
        with anyio.move_on_after(2, shield=True), suppress(nats.errors.Error):
            if self._link.is_up:
                await self._sub.drain()
            else:
                await self._sub.unsubscribe()

    async def open(self) -> None:
        """Subscribe; to be awaited before `run` is started, and followed by `stop` in any case."""
        self._link.check()
        self._link.observers.add(self.wake)
        self._sub = await self._link.nc.hear(self._inbox + ".*", self._on_message)

    async def run(self) -> None:
        """Pull until cancelled, or until the link has failed for good, which `wait` then raises."""
        attempt = 0
        while self._link.failure is None:
            # the server may be away or busy, for however long; where it is gone for good, `wait` raises that
            with suppress(InfrastructureError, AccessError):
                await self._link.wait_up()
                losses = self._link.losses
                name = await self._ensure()
                attempt = -1
                self._lost = False
                self._requested = 0
                await self._pull_from(f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{name}", losses)
            attempt += 1
            await anyio.sleep(backoff_s(attempt))  # a consumer that is refused again and again must not spin

    async def _pull_from(self, subject: str, losses: int) -> None:
        """Keep a request open until the connection or the consumer is lost."""
        while not self._lost and self._link.losses == losses and self._link.failure is None:
            self._stir = anyio.Event()
            pause = max(0.0, self._pause_until - anyio.current_time())
            if not self._requested and not pause:
                request = self._next_request()
                if request is not None:
                    self._current = f"{self._inbox}.{next(self._number)}"
                    self._heard = anyio.current_time()
                    self._requested = int(request["batch"])
                    self._is_empty = True
                    if not await self._link.send(subject, msgspec.json.encode(request), reply=self._current):
                        return
            silence = 2 * _HEARTBEAT_S - (anyio.current_time() - self._heard) if self._requested else None
            if silence is not None and silence <= 0:
                return  # the request was lost with the server or the leader that held it
            with anyio.move_on_after(pause or silence):
                await self._stir.wait()

    def _next_request(self) -> dict[str, int] | None:
        """Return what to ask for, or None while there is too little room to be worth a request."""
        batch = self._max_messages - self._held_messages
        if batch < max(1, self._max_messages // 4) and (self.queue or batch < 1):
            return None
        request = {"batch": batch if self._gathers or not self._gather_s else 1}
        if self._gathers:
            request["no_wait"] = True
        else:
            expires_s = _EXPIRES_S + seconds_to_tick(1.0)
            request |= {"expires": int(expires_s * _NS), "idle_heartbeat": int(_HEARTBEAT_S * _NS)}
        if self._max_bytes is not None:
            room = self._max_bytes - self._held_bytes
            if self._too_small is not None and not self._held_messages:
                request["batch"] = 1  # larger than the whole bound: it comes alone
            elif room <= (self._too_small or 0):
                return None
            else:
                request["max_bytes"] = room
        return request

    def _on_message(self, msg: Msg) -> None:
        self._heard = anyio.current_time()
        if msg.subject.startswith(self._inbox):
            self._on_status(msg)
            return
        self._too_small = None
        self.idle = self._is_empty = False
        if self._gather_s and not self._gathers:
            self._gathers, self._pause_until = True, self._heard + self._gather_s
        self._requested = max(0, self._requested - 1)
        if self._accept(msg):
            self._held_messages += 1
            self._held_bytes += weight(msg)
            self.queue.append(msg)
            self._arrived.set()
        if not msg.data and not msg.headers and self._requested:
            # Between accounts an empty message ends a request's answers: a server sends nothing more for this one,
            # nor heartbeats. Who stores empty messages would hold up every reader for seconds each time.
            self._lost, self._requested = True, 0
        if not self._requested:
            self._stir.set()

    def _on_status(self, msg: Msg) -> None:
        status = status_of(msg)
        if msg.subject != self._current or status == "100":  # of an older request, or a heartbeat
            return
        headers = msg.headers or {}
        text = headers.get("Description", "").lower()
        # Of a consumer with several copies this overtakes its last messages: they are on their way and take room.
        self._requested = max(0, self._requested - int(headers.get(_UNSENT_HEADER, self._requested)))
        if status in ("404", "408"):
            self.idle = True
            self._gathers = self._gather_s > 0 and not self._is_empty
            if self._gathers:
                self._pause_until = anyio.current_time() + self._gather_s
            self._arrived.set()
        elif "maxbytes" in text.replace(" ", ""):
            self._too_small = None if self._max_bytes is None else max(0, self._max_bytes - self._held_bytes)
        elif status == "409" and "batch completed" in text:
            pass
        else:
            self._lost = True
            self._requested = 0
        self._stir.set()
