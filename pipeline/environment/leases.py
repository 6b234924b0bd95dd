"""Holds a producer's leases: rights to generate, requested from the governor before any inference.

Guarantees that no more is generated than was granted: `acquire` returns only with a lease, and while the governor is
unavailable, the producer waits. Held leases are renewed until they are settled. A process that did not run for a while
learns by `is_held` or `on_lost` that a lease has ended meanwhile, and that another process may work on its group. The
supervisor reads the requests that renew leases (`leases_of`), and sends them while this process is held up.
"""

from bisect import insort
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count

import anyio
import msgspec

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.boottime import SURE_SHARE, boottime_s
from lachesis.pipeline.common.ticks import seconds_to_tick, sleep_until_tick
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.runtime.process_note import ProcessNote, read_notes
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import RENEWALS_OF_A_LEASE, LeaseReply, LeaseRequest
from lachesis.schemas.errors import SchemaError

__all__ = ["ProducerLeases", "leases_of"]

_REQUEST_TIMEOUT_S = 5.0
_WAIT_S = 1.0
"""For so long the governor may keep a request for a lease, until there is room; at most, since it ends at a tick."""
_DEFAULT_RETRY_S = 0.5
_MAX_PAUSE_S = 5.0
_FIRST_PAUSE_S = 0.25
_NOTE = "leases"
_MAX_REQUESTS = 16
"""Requests of one producer under way: as many as the governor answers at once."""


class ProducerLeases:
    """The leases of one producer in one environment. Run `renew` in a task beside their users."""

    def __init__(self, service: Service, producer: str, env: str) -> None:
        self._service = service
        self._producer = producer
        self._env = env
        self._held: dict[str, LeaseRequest] = {}  # by lease: the request that renews it
        self._queue = _RequestQueue()
        self._sure_until_s: dict[str, float] = {}
        self._note = ProcessNote(_NOTE)
        self._is_cut_off = False
        self.is_closed = False
        """Whether the last request was refused because nothing is granted to the environment: it may be halted."""
        self.left_behind = 0
        """Groups of the environment that a process may take up, as the last granted request was answered."""
        self.is_contended = False
        """Whether other environments requested leases too when the last request was answered."""
        self.renew_s = _FIRST_PAUSE_S
        """Seconds between two renewals; few until the lifetime of a lease is known."""
        self.on_lost: Callable[[str], None] = lambda lease: None
        """Called with a lease whose renewal is refused: it has ended while this process was stopped or cut off."""

    async def acquire(self, sequences: int, size: int, calls: int = 0) -> str | None:
        """Return a lease for one group of at most `sequences` and `size` bytes, None once the service drains.

        `calls`: bytes that its calls may take. Requests are sent in the order of the calls. While there is no room, one
        is under way, that of the group that has waited longest: the others would be refused for the same reason.
        """
        turn = self._queue.next_turn()
        while True:
            async with self._queue.place(turn):
                if self._service.draining.is_set():
                    return None
                alone = self._queue.at_once == 1
                lease, retry_s = await self.request_lease(
                    sequences, size, calls, wait_s=seconds_to_tick(_WAIT_S) if alone else 0.0
                )
                self._queue.record(granted=lease is not None)
                if lease is not None:
                    return lease
                if alone:
                    with anyio.move_on_after(retry_s):
                        await self._service.draining.wait()

    async def adopt(self, lease: str, sequences: int, size: int, calls: int) -> bool:
        """Renew the lease of a process that this one replaces, and hold it; False: it has ended."""
        request = LeaseRequest(
            op="renew",
            producer=self._producer,
            env=self._env,
            lease=lease,
            sequences=sequences,
            bytes=size,
            calls=calls,
        )
        began_s = boottime_s()
        try:
            reply = await self._request(request)
        except InfrastructureError:
            return False
        if reply.granted:
            self._held[lease] = request
            self._note_renewal(lease, reply, began_s)
            self._write_note()
        return reply.granted

    async def is_held(self, lease: str) -> bool:
        """Return whether no other process has taken up the lease's group so far.

        If the lease was not renewed in time, because this process was stopped, say, this requests the governor's answer
        and waits for it. False: it has ended, or the service drains.
        """
        while lease in self._held and not self._service.draining.is_set():
            began_s = boottime_s()
            if began_s < self._sure_until_s.get(lease, 0.0):
                return True
            try:
                reply = await self._request(self._held[lease])
            except InfrastructureError as error:
                self._service.mark_waiting("waiting", f"governor: {error}")
                await anyio.sleep(_DEFAULT_RETRY_S)
                continue
            if not reply.granted:
                return False
            self._note_renewal(lease, reply, began_s)
        return False

    def _note_renewal(self, lease: str, reply: LeaseReply, began_s: float) -> None:
        if reply.expires_s is not None:
            self._sure_until_s[lease] = began_s + SURE_SHARE * reply.expires_s

    async def request_lease(
        self,
        sequences: int,
        size: int,
        calls: int = 0,
        *,
        policy_step: int | None = None,
        outdated_only: bool = False,
        wait_s: float = 0.0,
    ) -> tuple[str | None, float]:
        """Send one request; return the lease, or None and the seconds after which to retry.

        `calls`, `policy_step`, `outdated_only` and `wait_s`: see `LeaseRequest`.
        """
        request = LeaseRequest(
            op="acquire",
            producer=self._producer,
            env=self._env,
            sequences=sequences,
            bytes=size,
            policy_step=policy_step,
            outdated_only=outdated_only,
            calls=calls,
            wait_s=wait_s,
        )
        began_s = boottime_s()
        try:
            reply = await self._request(request, _REQUEST_TIMEOUT_S + wait_s)
        except InfrastructureError as error:
            self._service.mark_waiting("waiting", f"governor: {error}")
            self._is_cut_off = True
            return None, _DEFAULT_RETRY_S
        if self._is_cut_off:
            self._is_cut_off = False
            self._service.mark_ok()
        self.is_closed, self.is_contended = reply.closed, reply.contended
        if reply.granted and reply.lease is not None:
            self.left_behind = reply.left_behind
            if self._service.draining.is_set():
                await self.release(reply.lease)
                return None, _DEFAULT_RETRY_S
            self._service.mark_ok()
            self._report_never(None)
            self._held[reply.lease] = request.replace(op="renew", lease=reply.lease, wait_s=0.0)
            self._note_renewal(reply.lease, reply, began_s)
            self._write_note()
            if reply.expires_s is not None:
                self.renew_s = min(reply.expires_s / RENEWALS_OF_A_LEASE, _MAX_PAUSE_S)
            return reply.lease, 0.0
        if not outdated_only:  # that says nothing of the environment
            if self._service.vitals.state != "waiting":  # what a group waits for that has its lease says more
                self._service.mark_waiting("backpressure", reply.reason)
            self._report_never(reply.reason if reply.never else None)
        return None, reply.retry_s or _DEFAULT_RETRY_S

    def _report_never(self, reason: str | None) -> None:
        """Report that no lease will ever be granted; None: one may be."""
        self._service.set_problem(
            f"{self._env} lease",
            None if reason is None else f"environment {self._env} can generate nothing: {reason}",
            held_up=["trainer"],
            stops=True,
        )

    def settled(self, lease: str) -> None:
        """Stop renewing a lease once its group is stored, or may be.

        The lease ends when the governor reads the group, or runs out.
        """
        self._drop(lease)

    async def release(self, lease: str) -> None:
        """Give a lease back unused. If the message is lost, the lease expires."""
        self._drop(lease)
        try:
            await self._request(LeaseRequest(op="release", producer=self._producer, env=self._env, lease=lease))
        except InfrastructureError:
            return

    def _drop(self, lease: str) -> None:
        self._sure_until_s.pop(lease, None)
        if self._held.pop(lease, None) is not None:
            self._write_note()

    def _write_note(self) -> None:
        self._note.write(msgspec.msgpack.encode(list(map(encode, self._held.values()))))

    async def renew(self) -> None:
        """Renew every lease held, a few times in its life. Runs until cancelled.

        The requests leave together: a process that stands still wakes once for all of them.
        """
        limiter = anyio.CapacityLimiter(_MAX_REQUESTS)
        while True:
            await sleep_until_tick(self.renew_s)
            async with anyio.create_task_group() as tasks:
                for lease, request in self._held.items():
                    tasks.start_soon(self._renew_one, lease, request, limiter)

    async def _renew_one(self, lease: str, request: LeaseRequest, limiter: anyio.CapacityLimiter) -> None:
        async with limiter:
            if lease not in self._held:
                return
            began_s = boottime_s()
            try:
                reply = await self._request(request, min(self.renew_s, _REQUEST_TIMEOUT_S))
            except InfrastructureError:
                return  # after its return the governor waits one lease period, so this lease still counts
            if lease in self._held and reply.granted:
                self._note_renewal(lease, reply, began_s)
            elif lease in self._held:
                self.on_lost(lease)

    async def renew_over(self, bus: Bus, timeout_s: float) -> None:
        """Renew every lease held once, over another connection.

        For another thread, while this one's loop is held.
        """
        for request in list(self._held.values()):
            try:
                await self._request(request, timeout_s, bus)
            except InfrastructureError:
                return

    async def _request(
        self, request: LeaseRequest, timeout_s: float = _REQUEST_TIMEOUT_S, bus: Bus | None = None
    ) -> LeaseReply:
        subject = subjects.lease(self._service.run, self._env)
        over = self._service.bus if bus is None else bus
        return decode(LeaseReply, await over.request(subject, encode(request), timeout_s=timeout_s))


class _RequestQueue:
    """Lets requests go in the order of their turns, as many at once as were granted in a row, at least one.

    One that was refused keeps its turn, so that groups that need much room are not overtaken for ever.
    """

    def __init__(self) -> None:
        self.at_once = 1
        self._under_way = 0
        self._turns = count()
        self._waiting: list[tuple[int, anyio.Event]] = []

    def next_turn(self) -> int:
        return next(self._turns)

    @asynccontextmanager
    async def place(self, turn: int) -> AsyncIterator[None]:
        """Wait until the request of this turn may go; the context lasts until it is answered."""
        waits = (turn, anyio.Event())
        insort(self._waiting, waits)
        self._admit()
        try:
            await waits[1].wait()
            yield
        finally:
            if waits[1].is_set():
                self._under_way -= 1
            else:
                self._waiting.remove(waits)
            self._admit()

    def record(self, *, granted: bool) -> None:
        self.at_once = min(self.at_once + 1, _MAX_REQUESTS) if granted else 1

    def _admit(self) -> None:
        while self._waiting and self._under_way < self.at_once:
            _, admitted = self._waiting.pop(0)
            self._under_way += 1
            admitted.set()


def leases_of(pid: int) -> list[LeaseRequest]:
    """Return requests that renew the leases which a process of this machine holds, of all its producers.

    Empty: it holds none, or does not say.
    """
    found: list[LeaseRequest] = []
    for note in read_notes(pid, _NOTE):
        with suppress(msgspec.MsgspecError, SchemaError):
            found += [decode(LeaseRequest, one) for one in msgspec.msgpack.decode(note, type=list[bytes])]
    return found
