"""Serves the sessions of one process over HTTP: three dialects, tasks, rewards and starts.

Guarantees that a session is reached by its key alone; that an error has the form of the dialect in which it was
requested; that a stream is kept alive while the model answers; and that an answer which its client did not get is
remembered as one.

    POST /v1/chat/completions  /v1/responses  /v1/messages      by the key as API key
    POST /s/KEY/v1/...         the same, by the key in the path
    POST /v1/messages/count_tokens   GET /v1/models  /v1/models/policy        in both ways, too
    GET  /task                       POST /reward  /end                       in both ways, too
    POST /sessions             an agent that runs elsewhere takes a sample
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, NamedTuple

import anyio
import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lachesis.pipeline.bus.addresses import url_host
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.loopback import LOOPBACK
from lachesis.pipeline.errors import AccessError, InfrastructureError, NotFoundError, PromptTooLongError
from lachesis.pipeline.extensions.endpoint.agent_session import AgentSession, SessionEndedError
from lachesis.pipeline.extensions.endpoint.logic.call_tree import RecordedAnswer
from lachesis.pipeline.extensions.endpoint.logic.conversation import ModelRequest
from lachesis.pipeline.extensions.endpoint.logic.dialects import DIALECTS
from lachesis.pipeline.extensions.endpoint.logic.dialects.dialect import Dialect, StreamEvent
from lachesis.pipeline.extensions.endpoint.logic.dialects.openai_errors import openai_error
from lachesis.pipeline.extensions.endpoint.peers import NOT_YET, Peers, UnknownSessionError
from lachesis.pipeline.inference.serving.replies import body_of
from lachesis.pipeline.runtime.http import BrowserGuard, HttpServer
from lachesis.schemas.errors import DataError, LachesisError
from lachesis.schemas.values import Finite, check_plain

__all__ = ["EndpointServer", "LiveSession"]

_PING_S = 5.0
"""Seconds after which a stream that has nothing to say yet begins, and then says so again."""
_RETRY_AFTER_S = 2
_STORE_S = 30.0
"""Seconds for which a late report waits until its sample is stored."""
_MAX_SETTLED = 4096
"""Sessions whose reports are remembered after their end, for those that are repeated."""
_MAX_DIGITS = 20
_TAKE_UP_MS = 60_000
"""For so long after its start a process may take up sessions whose agents have started before."""
_CONTEXT_CODE = "context_length_exceeded"
"""By which clients of OpenAI recognize a conversation that they should shorten."""


_MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "lachesis"}
_Component = Annotated[str, Meta(min_length=1, max_length=128)]


class _Reward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /reward: one number, or several by name; null: unknown. `turns`: rewards of single answers, by their ids."""

    reward: Finite | msgspec.UnsetType | None = msgspec.UNSET
    rewards: Annotated[dict[_Component, Finite | None], Meta(max_length=64)] = {}
    turns: Annotated[dict[_Component, Finite], Meta(max_length=4096)] = {}

    def __post_init__(self) -> None:
        if (self.reward is msgspec.UNSET) == (not self.rewards):
            raise ValueError('give {"reward": NUMBER}, or {"rewards": {"NAME": NUMBER}}')


@dataclass(eq=False)
class LiveSession:
    """A session that agents may use now, one at a time.

    `task`: what they get of their task. `takes_rewards`: whether the program, and no rater, judges the sample.
    """

    recorded: AgentSession
    task: Mapping[str, Any]
    takes_rewards: bool
    reward_name: str
    key: str
    """What agents reach it by; that of an agent which runs elsewhere ends in a dot and `number`."""
    number: int = 0
    """Of the newest agent that has taken it: milliseconds of Unix time, so that it rises across kills. 0: none has."""
    may_be_late: bool = False
    """Whether its reward may be reported after the agent's end."""
    outlives_kills: bool = False
    """Whether its agent runs elsewhere, and so does not start again, and report again, after a kill of this process."""
    reported: bytes | None = None
    """Digest of the report that it got."""
    taken: anyio.Event = field(default_factory=anyio.Event)
    """Set once an agent that runs elsewhere has taken it."""


class _SessionReport(NamedTuple):
    """A session that has ended, and the digest of its report."""

    digest: bytes
    recorded: AgentSession


class EndpointServer:
    """The sessions of one process, and the server before them.

    `token`: what agents that run elsewhere send to start a session; None: none do. `hold_s`: seconds for which such a
    request waits for a sample. `peers`: addresses of the endpoints of other replicas; a request of a session that is
    not here is passed on to them.
    """

    def __init__(self, host: str, port: int, *, token: str | None, hold_s: float, peers: Sequence[str] = ()) -> None:
        self._host = host
        self._port = port
        self._token = token
        self._hold_s = hold_s
        self._peer_addresses = peers
        self._peers: Peers | None = None
        self._live: dict[str, LiveSession] = {}
        self._session_added = anyio.Event()
        """Set when a session is served from then on."""
        self._settled: OrderedDict[str, _SessionReport] = OrderedDict()
        self._open: deque[LiveSession] = deque()
        self._opened = anyio.Condition()
        self._began_ms = 0
        self.url = ""
        """Where it listens, while `running` lasts."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve while the context lasts. Raises `OSError` if it cannot listen there."""
        with socket.create_server((self._host, self._port), backlog=1024) as listener:
            self._began_ms = _now_ms()
            self.url = f"http://{url_host(self._host)}:{listener.getsockname()[1]}"
            server = HttpServer.over(self.app(), grace_s=1)
            async with AsyncExitStack() as stack, background() as tasks:
                if self._peer_addresses:
                    self._peers = await stack.enter_async_context(Peers.connected(self._peer_addresses))
                tasks.start_soon(server.serve_until_cancelled, [listener])
                yield

    @contextmanager
    def serving(self, live: LiveSession) -> Iterator[str]:
        """Let agents use a session while the context lasts; yields its address."""
        self._live[live.key] = live
        self._session_added.set()
        self._session_added = anyio.Event()
        try:
            yield f"{self.url}/s/{live.key}"
        finally:
            del self._live[live.key]
            if live.reported is not None:
                self._settled[live.key] = _SessionReport(live.reported, live.recorded)
                if len(self._settled) > _MAX_SETTLED:
                    self._settled.popitem(last=False)
            live.recorded.ended.set()
            self._mark_taken(live)

    async def offer(self, live: LiveSession) -> None:
        """Let an agent that runs elsewhere take a session, unless one uses it already."""
        if live.taken.is_set():
            return
        async with self._opened:
            self._open.append(live)
            self._opened.notify()

    def app(self) -> Starlette:
        """Return the application."""
        routes = [Route("/sessions", self._answering(self._start, openai_error), methods=["POST"])]
        anthropic = DIALECTS["/v1/messages"]
        count = self._answering(partial(self._count, anthropic), anthropic.error)
        for prefix in ("", "/s/{key}"):
            routes.append(Route(f"{prefix}{anthropic.path}/count_tokens", count, methods=["POST"]))
            for path, dialect in DIALECTS.items():
                handler = self._answering(partial(self._answer, dialect), dialect.error)
                routes.append(Route(prefix + path, handler, methods=["POST"]))
            for path, method, handle in (
                ("/v1/models", "GET", self._models),
                ("/v1/models/{model}", "GET", self._model),
                ("/task", "GET", self._task),
                ("/reward", "POST", self._reward),
                ("/end", "POST", self._end),
            ):
                routes.append(Route(prefix + path, self._answering(handle, openai_error), methods=[method]))
        hosts = () if self._host in LOOPBACK else None
        guard = Middleware(BrowserGuard, hosts=hosts, refuse=lambda why: _json(openai_error(403, why), 403))
        return Starlette(routes=routes, middleware=[guard], exception_handlers={404: _unserved, 405: _unserved})

    def _answering(
        self, handler: Callable[[Request], Awaitable[Any]], error: Callable[..., dict[str, Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        def refused(raised: LachesisError) -> Response:
            status, code = _status(raised)
            headers = {"Retry-After": str(_RETRY_AFTER_S)} if status == 503 else {}
            return _json(error(status, str(raised), code), status, headers)

        async def elsewhere(request: Request, unknown: UnknownSessionError) -> Response:
            try:
                if self._peers is None:
                    raise unknown
                found = await self._peers.answer(request, unknown, partial(self._taken_up, _key(request)[0]))
                return await endpoint(found) if isinstance(found, Request) else found
            except ClientDisconnect:
                return Response(status_code=499)
            except UnknownSessionError as raised:
                if (not_yet := self._not_yet(request)) is None:
                    return refused(raised)
                answer = refused(not_yet)
                answer.headers[NOT_YET] = "1"
                return answer
            except LachesisError as raised:
                return refused(raised)

        async def endpoint(request: Request) -> Response:
            try:
                value = await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except UnknownSessionError as unknown:
                return await elsewhere(request, unknown)
            except LachesisError as raised:
                return refused(raised)
            return value if isinstance(value, Response) else _json(value)

        return endpoint

    def _session(self, request: Request) -> LiveSession:
        """Return the session whose key a request has: an agent has taken it. Raises `UnknownSessionError`."""
        key, number = _key(request)
        live = self._live.get(key)
        if live is None:
            raise UnknownSessionError(
                "no session has this key: it may have ended, or not be taken up yet after a restart"
            )
        if number < live.number:
            raise AccessError("another agent works on this sample: this one was silent for too long after a restart")
        live.number = number
        self._mark_taken(live)
        return live

    async def _taken_up(self, key: str) -> None:
        """Wait until this process has the session with a key."""
        while key not in self._live:
            await self._session_added.wait()

    def _not_yet(self, request: Request) -> InfrastructureError | None:
        """Return that a session may still be taken up from the log; None: it may not."""
        _, number = _key(request)
        if 0 < number < self._began_ms and _now_ms() - self._began_ms < _TAKE_UP_MS:
            return InfrastructureError("sessions of before a restart are being taken up: try again")
        return None

    def _mark_taken(self, live: LiveSession) -> None:
        """Let no other agent take a session."""
        live.taken.set()
        if live in self._open:
            self._open.remove(live)

    async def _answer(self, dialect: Dialect, request: Request) -> Any:
        live = self._session(request)
        body = await body_of(request, dict[str, Any])
        check_plain("the request", body)  # it is walked recursively
        wanted = dialect.read(body)
        is_retry = request.headers.get("x-stainless-retry-count", "0") not in {"", "0"}
        pending = _PendingAnswer(live.recorded, wanted, is_retry=is_retry, has_hung_up=request.is_disconnected)
        live.recorded.start(pending.run)
        if wanted.stream:
            with anyio.move_on_after(_PING_S):
                await pending.done.wait()
            if not pending.done.is_set() or pending.error is None:
                headers = {"Cache-Control": "no-cache"}
                events = _stream(request, dialect, wanted, pending)
                return StreamingResponse(events, headers=headers, media_type="text/event-stream")
        found = await pending.result()
        body = dialect.answer(wanted, found.answer)
        if not await request.is_disconnected():
            found.is_delivered = True
        return body

    async def _count(self, dialect: Dialect, request: Request) -> Any:
        live = self._session(request)
        body = await body_of(request, dict[str, Any])
        check_plain("the request", body)
        return {"input_tokens": await live.recorded.prompt_tokens(dialect.read(body))}

    async def _models(self, request: Request) -> Any:
        self._session(request)
        return {"object": "list", "data": [_MODEL]}

    async def _model(self, request: Request) -> Any:
        self._session(request)
        if (name := request.path_params["model"]) != _MODEL["id"]:
            raise NotFoundError(f"there is no model {name!r:.80}; the model is {_MODEL['id']!r}")
        return _MODEL

    async def _task(self, request: Request) -> Any:
        return self._session(request).task

    async def _reward(self, request: Request) -> Any:
        settled = self._settled.get(_key(request)[0])
        if settled is not None:
            if settled.digest != _digest(await body_of(request, _Reward)):
                raise SessionEndedError("this session has another reward already")
            return await _stored(settled.recorded)
        live = self._session(request)
        given = await body_of(request, _Reward)
        if not live.takes_rewards:
            raise DataError('raters score this sample; reward = "program" in its environment takes this one')
        rewards = given.rewards if given.reward is msgspec.UNSET else {live.reward_name: given.reward}
        live.recorded.report(rewards, given.turns)
        live.reported = _digest(given)
        if live.outlives_kills or live.recorded.agent_ended.is_set():  # what is answered is not reported again
            return await _stored(live.recorded)
        return {"recorded": True}

    async def _end(self, request: Request) -> Any:
        """Take the end of an agent that runs elsewhere, where its reward comes later."""
        live = self._session(request)
        if not live.may_be_late:
            raise DataError("this environment waits for no late reward: set late_reward_s, or POST /reward")
        live.recorded.agent_ended.set()
        return {"ended": True}

    def _base_url_of(self, request: Request) -> str:
        """Return the address by which an agent has found an endpoint: it may be that of several, or of a proxy."""
        host = request.headers.get("host")
        return f"{request.url.scheme}://{host}" if host else self.url

    async def _start(self, request: Request) -> Any:
        """Hand out a sample. It waits until there is one: they are there once the run wants more."""
        if self._token is None or not hmac.compare_digest(_bearer(request).encode(), self._token.encode()):
            raise AccessError("starting a session takes the token in the environment's token_file, as a bearer token")
        with anyio.move_on_after(self._hold_s):
            async with self._opened:
                while not self._open:
                    await self._opened.wait()
                if await request.is_disconnected():
                    raise ClientDisconnect
                live = self._open[0]
                self._mark_taken(live)
            if not await live.recorded.is_held():
                raise InfrastructureError("this sample is another process's by now; try again")
            live.number = max(_now_ms(), live.number + 1)
            key = f"{live.key}.{live.number}"
            url = f"{self._base_url_of(request)}/s/{key}"
            return {
                "url": url,
                "key": key,
                "openai_base_url": f"{url}/v1",
                "anthropic_base_url": url,
                "task": live.task,
            }
        raise InfrastructureError("the run wants no further sample now; try again")


class _PendingAnswer:
    """A request that is being answered, also after its client has hung up."""

    def __init__(
        self,
        recorded: AgentSession,
        wanted: ModelRequest,
        *,
        is_retry: bool,
        has_hung_up: Callable[[], Awaitable[bool]],
    ) -> None:
        self._recorded = recorded
        self._wanted = wanted
        self._is_retry = is_retry
        self._has_hung_up = has_hung_up
        self.done = anyio.Event()
        self.found: RecordedAnswer | None = None
        self.error: LachesisError | None = None

    async def run(self) -> None:
        try:
            self.found = await self._recorded.answer(
                self._wanted, is_retry=self._is_retry, has_hung_up=self._has_hung_up
            )
        except LachesisError as error:
            self.error = error
        finally:
            self.done.set()

    async def result(self) -> RecordedAnswer:
        await self.done.wait()
        if self.found is None:
            raise self.error or self._recorded.closing_error
        return self.found


async def _stream(
    request: Request, dialect: Dialect, wanted: ModelRequest, pending: _PendingAnswer
) -> AsyncIterator[bytes]:
    """Yield the events of an answer once it is recorded, and until then comments, which clients skip."""
    while not pending.done.is_set():
        yield b": the model answers\n\n"
        with anyio.move_on_after(_PING_S):
            await pending.done.wait()
    try:
        found = await pending.result()
    except LachesisError as error:
        yield _event(dialect.error_event(_status(error)[0], str(error)))
        return
    events = [_event(event) for event in dialect.events(wanted, found.answer)]
    for event in events[:-1]:
        yield event
    if not await request.is_disconnected():
        found.is_delivered = True
    yield events[-1]


def _event(event: StreamEvent) -> bytes:
    name = b"" if event.name is None else f"event: {event.name}\n".encode()
    return name + b"data: " + (b"[DONE]" if event.data is None else msgspec.json.encode(event.data)) + b"\n\n"


def _status(error: LachesisError) -> tuple[int, str | None]:
    """Return the HTTP status of an error, and OpenAI's code of it."""
    match error:
        case AccessError():
            return 401, None
        case NotFoundError():
            return 404, None
        case PromptTooLongError():
            return 400, _CONTEXT_CODE
        case SessionEndedError():
            return 409, None
        case DataError():
            return 400, None
        case _:
            return 503, None


async def _stored(recorded: AgentSession) -> dict[str, Any]:
    """Return the answer to a report once its sample is stored.

    Raises `InfrastructureError`, and `SessionEndedError` if the sample is left out.
    """
    stored = recorded.session.ended
    with anyio.move_on_after(_STORE_S):
        await stored.wait()
    if recorded.left_out is not None:
        raise SessionEndedError(f"this sample is left out: {recorded.left_out}")
    if not stored.is_set():
        raise InfrastructureError("this reward is not stored yet; report it again")
    return {"recorded": True}


async def _unserved(request: Request, error: Exception) -> Response:
    """Answer a request for what is not served, in the form of the dialect that it most likely speaks."""
    assert isinstance(error, HTTPException)  # noqa: S101 - it is registered for these
    is_anthropic = "/v1/messages" in request.url.path or "anthropic-version" in request.headers
    form = DIALECTS["/v1/messages"].error if is_anthropic else openai_error
    parts = request.url.path.split("/")
    path = "/".join(["", *parts[3:]] if parts[1:2] == ["s"] else parts)  # without the key
    text = f"{request.method} {path[:80]} is not served here; the model answers POST {', '.join(DIALECTS)}"
    return _json(form(error.status_code, text), error.status_code, error.headers)


def _digest(report: _Reward) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(report, order="deterministic")).digest()


def _key(request: Request) -> tuple[str, int]:
    """Return the key of the session that a request is for, and the number of its agent."""
    given = request.path_params.get("key") or request.headers.get("x-api-key") or _bearer(request)
    key, _, number = given.partition(".")
    return key, int(number) if number.isascii() and number.isdecimal() and len(number) < _MAX_DIGITS else 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _bearer(request: Request) -> str:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, dict(headers or {}), media_type="application/json")
