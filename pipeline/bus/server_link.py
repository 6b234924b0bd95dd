"""One connection to the server, with its state and one inbox for all answers.

nats-py carries the bytes; what it does badly is done here: an answer that never comes or a connection that breaks ends
a wait at once instead of hanging, a refused subject stops the bus instead of looking like a timeout, and a
cancellation that `publish` swallows is raised again.
"""

import asyncio
import itertools
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import anyio
import anyio.lowlevel
import nats.errors
from nats.aio.msg import Msg

from lachesis.pipeline.bus.acknowledged import AcknowledgedEnds
from lachesis.pipeline.bus.client import NatsClient, hang_up, is_refusal
from lachesis.pipeline.bus.config import ConnectionConfig
from lachesis.pipeline.bus.diagnosis import explain
from lachesis.pipeline.bus.pending_requests import AnswerSeries, PendingRequest, PendingRequests, resolve
from lachesis.pipeline.bus.replies import ApiAnswer, decode_answer, error_in, lacks_leader
from lachesis.pipeline.bus.reply_subjects import RefusedReplies, is_inbox, refused_publication
from lachesis.pipeline.bus.routing import stream_in_api
from lachesis.pipeline.bus.server_waits import NO_ANSWER, STALLED_AFTER_S, ServerWait, ServerWaits
from lachesis.pipeline.common.backoff import RetryPolicy
from lachesis.pipeline.errors import AccessError, BusClosedError, InfrastructureError, PermissionDeniedError
from lachesis.schemas.errors import DataError, LachesisError

__all__ = ["ServerLink", "backoff_s", "is_no_responder", "patience_s", "status_of"]

log = logging.getLogger("lachesis")

A = TypeVar("A", bound=ApiAnswer)

_NO_RESPONDER = "503"
_PERMISSION_HINT = (
    "it is not meant to do that, or its permissions are older than its configuration; run `lachesis auth init` again "
    "with this configuration and let the server read it (nats-server --signal reload)"
)
_STREAM_INFO = "$JS.API.STREAM.INFO."
_QUICK = RetryPolicy(first_s=0.02, longest_s=0.5)
"""Between two requests: an answer takes milliseconds, and the connection is there."""
_PATIENCE = RetryPolicy(first_s=2.0, growth=1.5)
"""For an answer, before the request is repeated: longer than answers take, so that a slow server gets it once."""


def status_of(msg: Msg) -> str | None:
    """Return the status of a message that is none of the stream's, else None."""
    return msg.headers.get("Status") if msg.headers else None


def is_no_responder(msg: Msg) -> bool:
    return not msg.data and status_of(msg) == _NO_RESPONDER


def backoff_s(attempt: int) -> float:
    """Return how long to wait after failed attempt number `attempt` (from 0), seconds."""
    return _QUICK.pause_s(attempt + 1)


def patience_s(silent: int, longest_s: float) -> float:
    """Return how long to wait for an answer after `silent` attempts that got none, seconds.

    Short at first: of a cluster, one server may have died with the question while the connection to another lives on.
    Then longer, so that a slow server does not get more and more requests.
    """
    return min(longest_s, _PATIENCE.pause_s(silent + 1))


def _why_unconnected(error: OSError) -> str:
    """Return why an attempt to connect again failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the server cannot prove its identity ({error.verify_message}): give it a certificate that is valid now, "
            "or set this machine's clock right"
        )
    if isinstance(error, ssl.SSLError):
        return f"TLS fails ({error.reason}): the server may refuse this client's certificate, which may have expired"
    return f"lost; trying again ({error.strerror or error})"


class ServerLink:
    """Wraps a connected client, for the streams of `run`; `setup` must be awaited once.

    `observers` are called at every change of state.
    """

    def __init__(self, nc: NatsClient, config: ConnectionConfig, run: str) -> None:
        self.nc = nc
        self.config = config
        self.run = run
        self.observers: set[Callable[[], None]] = set()
        self.losses = 0
        """How often the connection was lost: when it changes, requests must be repeated."""
        self.failure: LachesisError | None = None
        self.last_error: Exception | None = None
        self.refusal = ""
        """How the server refuses the credentials now; empty: it does not."""
        self.waits = ServerWaits(time.monotonic)
        self.explanations: dict[str, tuple[float, str]] = {}
        """By stream when it was last explained why it does not answer, and how: see `diagnosis.explain`."""
        self.optional: set[str] = set()
        """Subjects that may be refused without harm: requests on them only explain something."""
        self.refused: set[str] = set()
        """Those that were refused, and are not requested again."""
        self.unanswered = RefusedReplies()
        self.acknowledged = AcknowledgedEnds()
        self._server = ""
        self._node = ""
        self._lost: ServerWait | None = None
        self._up = anyio.Event()
        self._requests = PendingRequests()

    async def setup(self) -> None:
        self._requests.inbox = self.nc.new_inbox()
        await self.nc.hear(f"{self._requests.inbox}.*", self._requests.receive)
        self._server, self._node = self.server_name, self.nc.node_name
        self._up.set()

    async def close(self) -> None:
        """Close the connection; whatever waits raises `BusClosedError`."""
        self.fail(BusClosedError("the bus was closed"))
        await hang_up(self.nc, within_s=2.0)
        self.acknowledged.close()

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def server_name(self) -> str:
        """Host and port of the server that the client is connected to, or was last."""
        url = self.nc.connected_url
        return f"{url.hostname}:{url.port}" if url is not None else self._server

    async def on_disconnected(self) -> None:
        self.losses += 1
        self.acknowledged.mark_reconnected()
        if self._lost is None and self.failure is None:
            self._lost = self.waits.begin(f"connection to {self._server}", reason="lost; trying again")
            asyncio.get_running_loop().call_later(STALLED_AFTER_S, self._log_loss, self._lost)
        if self._up.is_set():
            self._up = anyio.Event()
        self._requests.lose()
        self._notify()

    async def on_reconnected(self) -> None:
        if self._lost is not None:
            to = "it again" if self.nc.node_name == self._node else self.nc.node_name
            log.info("lost %s; connected to %s after %.1f s", self._node, to, self.waits.seconds(self._lost))
            self.waits.end(self._lost)
        self.refusal = ""
        self._lost, self._server, self._node = None, self.server_name, self.nc.node_name
        self._up.set()
        self._notify()

    def _log_loss(self, loss: ServerWait) -> None:
        """Log a connection that is still lost. One that is back at once is logged then, in one line."""
        if self._lost is loss and self.failure is None:
            log.info("lost %s, and no server answers; trying again", self._node)

    async def on_closed(self) -> None:
        self.fail(BusClosedError(f"the connection to the server was closed: {self.last_error or 'no reason given'}"))

    async def on_error(self, error: Exception) -> None:
        self.last_error = error
        if self._lost is not None and isinstance(error, OSError):  # of an attempt to connect again
            self._lost.reason = _why_unconnected(error)
        text = self.nc.out_of_domain(str(error).lower())
        if "permissions violation" in text:
            refused = {subject for subject in self.optional if f'"{subject.lower()}"' in text}
            self.refused |= refused
            if refused:
                return  # the request served only a message to people; the caller continues without the answer
            subject = refused_publication(text)
            if subject is not None and is_inbox(subject, self.config.inbox_prefix):
                self._leave_unanswered(subject)  # only answers are published to inboxes
                return
            self.fail(
                PermissionDeniedError(
                    f"{self._who()} was refused by the server ({text.removeprefix('nats: ')}): {self._hint(text)}"
                )
            )
        elif is_refusal(text):
            self.refusal = f"the server no longer takes the credentials of {self._who()} ({text})"
            if not self.nc.outlasts_refusal:
                self.fail(AccessError(f"{self.refusal}: {_PERMISSION_HINT}"))

    def may_answer(self, msg: Msg) -> bool:
        """Return whether a request names an inbox for its answer. One that names another subject is counted."""
        if msg.reply and not is_inbox(msg.reply, self.config.inbox_prefix):
            self._leave_unanswered(msg.reply)
            return False
        return bool(msg.reply)

    def _leave_unanswered(self, reply: str) -> None:
        if self.unanswered.record(reply, time.monotonic()):
            log.warning("%s", self.unanswered.describe())

    def _hint(self, refusal: str) -> str:
        """Return what to do about a refusal."""
        prefix = self.config.inbox_prefix
        if f'for subscription to "{prefix.lower()}.' not in refusal:
            return _PERMISSION_HINT
        return (
            f'no answer can reach it: set nats.inbox_prefix to what this user may subscribe to (now "{prefix}"; '
            f'"_INBOX_me" where the server allows "_INBOX_me.>"), or let the server allow "{prefix}.>"'
            + (f"; {_PERMISSION_HINT}" if self.config.nkey_file else "")
        )

    def _who(self) -> str:
        key = self.config.nkey_file
        return f"{self.nc.options['name']} (key {key})" if key else str(self.nc.options["name"])

    def fail(self, error: LachesisError) -> None:
        """Make every waiting and every later call raise `error`. The first failure stays."""
        if self.failure is None:
            self.failure = error
        self._requests.fail(self.failure)
        self._up.set()
        self._notify()

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)  # a new one, since many tasks may raise it

    async def wait_up(self) -> None:
        """Wait until there is a connection. Raises the failure where there will be none."""
        if not self.is_up:
            self.check()
            await self._up.wait()
            self.check()

    async def wait_down(self) -> None:
        """Wait until the connection is lost. Raises the failure where there will be none again."""
        lost = anyio.Event()

        def look() -> None:
            if not self.is_up:
                lost.set()

        self.observers.add(look)
        try:
            look()
            await lost.wait()
        finally:
            self.observers.discard(look)
        self.check()

    @property
    def is_up(self) -> bool:
        return self._up.is_set() and self.failure is None

    def _notify(self) -> None:
        for observer in list(self.observers):
            observer()

    # -- messages ------------------------------------------------------------------------------------------------

    async def send(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> bool:
        """Hand a message to the client; False when there was no connection to hand it to.

        True does not say that it arrived. Raises `DataError` when it is larger than the server takes.
        """
        self.check()
        if not self.is_up:
            return False
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        try:
            await self.nc.publish(subject, data, reply=reply, headers=dict(headers) if headers else None)
        except nats.errors.MaxPayloadError as error:
            raise DataError(f"{subject}: {len(data)} bytes where the server takes {self.nc.max_payload}") from error
        except nats.errors.BadSubjectError as error:
            raise DataError(f"{subject!r} is no subject") from error
        except nats.errors.OutboundBufferLimitError:
            return False
        except nats.errors.ConnectionClosedError as error:
            self.check()
            raise BusClosedError("the connection was closed") from error
        if task is not None and task.cancelling() > before:  # the client swallowed it
            await anyio.lowlevel.checkpoint_if_cancelled()  # a scope knows only its own
            raise asyncio.CancelledError
        return True

    async def post(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> PendingRequest:
        """Send a request. The caller must `settle` or `drop` it."""
        request = self._requests.begin()
        try:
            sent = await self.send(subject, data, reply=self._requests.reply_to(request.token), headers=headers)
        except BaseException:
            self.drop(request)
            raise
        if not sent:
            resolve(request.answer)
        return request

    async def settle(self, request: PendingRequest, timeout_s: float) -> Msg | None:
        """Wait for the answer: None when the connection was lost or the time is up."""
        timer = asyncio.get_running_loop().call_later(timeout_s, resolve, request.answer)
        try:
            return await request.answer
        finally:
            timer.cancel()
            self.drop(request)

    def drop(self, request: PendingRequest) -> None:
        """Forget a request; its answer, should it come, is ignored."""
        self._requests.drop(request)

    @asynccontextmanager
    async def series(self, subject: str, data: bytes) -> AsyncIterator[AnswerSeries]:
        """Send a request with several answers, which are heard while the context is open."""
        with self._requests.series() as (token, series):
            if not await self.send(subject, data, reply=self._requests.reply_to(token)):
                series.end()
            yield series

    async def request_once(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> Msg | None:
        """Ask once and return the answer, or None where none came."""
        request = await self.post(subject, data, headers)
        return await self.settle(request, timeout_s or self.config.ack_timeout_s)

    @asynccontextmanager
    async def subscribed(self, subject: str, on_message: Callable[[Msg], None], queue: str = "") -> AsyncIterator[None]:
        """Subscribe while the context is open; the server knows of it when the body begins.

        Survives reconnects.
        """
        self.check()
        sub = await self.nc.hear(subject, on_message, queue)
        try:
            # The server takes in what one client sends in order, so whatever answers this knows the subscription. No
            # answer: it is away just now, and is subscribed again with the reconnect.
            await self.request_once("$JS.API.INFO", b"", timeout_s=1)
            yield
        finally:
            with anyio.move_on_after(1, shield=True), suppress(nats.errors.Error):
                await sub.unsubscribe()

    async def call_api(
        self, kind: type[A], subject: str, request: bytes, *, what: str, give_up_s: float | None = None
    ) -> A:
        """Ask JetStream's API until it answers, for `give_up_s` seconds (None: those of the configuration).

        Raises what the answer's error means, `InfrastructureError` when there was none in time.
        """
        msg = await self.call_raw(subject, request, what=what, give_up_s=give_up_s)
        return decode_answer(kind, msg.data, what)

    async def call_raw(
        self, subject: str, request: bytes, *, what: str, give_up_s: float | None = None, patient: bool = False
    ) -> Msg:
        """As `call_api`, without decoding; `patient`: for ever. Only transient errors are retried."""
        give_up_s = give_up_s or self.config.give_up_s
        stream = stream_in_api(subject)
        with self.waits.waiting(what, stream) as wait:
            with anyio.move_on_after(None if patient else give_up_s):
                for attempt in itertools.count():
                    await self.wait_up()
                    msg = await self.request_once(
                        subject, request, timeout_s=patience_s(attempt, self.config.ack_timeout_s)
                    )
                    error = error_in(msg.data) if msg is not None else None
                    refusal = error.description if error else None
                    if msg is not None and subject.startswith(_STREAM_INFO) and lacks_leader(msg.data):
                        refusal = f"{stream} has no leader"
                    elif msg is not None and not is_no_responder(msg) and (error is None or not error.is_transient):
                        return msg
                    await self.explain_wait(wait, stream, refusal)
                    await anyio.sleep(backoff_s(attempt))
            if wait.reason == NO_ANSWER:
                wait.reason = await explain(self, stream)
            raise InfrastructureError(f"{what}: {wait.reason}, for {give_up_s:g} s")

    async def explain_wait(self, wait: ServerWait, stream: str, refusal: str | None) -> None:
        """Note why a wait for `stream` goes on.

        It is the server's refusal, or its answer about the stream once the wait is a stall.
        """
        if refusal is not None:
            wait.reason = refusal
        if self.waits.seconds(wait) >= STALLED_AFTER_S:
            wait.reason = await explain(self, stream)
