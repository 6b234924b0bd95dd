"""Serves the agent tools over MCP: on stdin and stdout, or over HTTP with a token.

Guarantees that nothing but the protocol is written to stdout, and that a tool's error reaches the agent as a sentence.
Over HTTP, no client without the token reaches a tool, nor does a web page by another name of this machine, and the size
of a request is bounded.
"""

import functools
import hmac
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lachesis import __version__
from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.runtime.http import CancellableServer, http_within
from lachesis.schemas.errors import LachesisError
from lachesis.services.agent.tools import AgentTools

__all__ = ["HTTP_PATH", "make_server", "serve_http"]

HTTP_PATH = "/mcp"
_HEAD_S = 10.0
"""Seconds in which a request's headers must have arrived."""
_MAX_BODY_BYTES = 1 << 20
"""A tool's arguments are some hundred bytes; those of the longest edit some thousand."""
_BODY_S = 30.0
"""Seconds in which a request's body must have arrived."""
_MAX_CONNECTIONS = 128
_MAX_SESSIONS = 32
"""Sessions of agents that are open at once; one more is refused with 503 until one ends."""
_SESSION_S = 1800.0
"""Seconds without a request after which a session ends."""
_MAX_CALLS = 32
"""Calls of tools at work or waiting; one more is refused."""
_SHUTDOWN_S = 5
"""Seconds that open connections have when the server ends."""
_INSTRUCTIONS = """Train language models by reinforcement learning with Lachesis. The usual order: rl_list_environments,
rl_select_environment, rl_get_current_config, rl_edit_config, rl_test_inference, rl_start_training, rl_check_status as
often as you like, rl_get_results. A reward that rises proves nothing by itself: watch the held-out rate
(eval_percent_correct) and rl_health, and read answers with rl_list_rollouts and rl_show_rollout."""


def make_server(tools: AgentTools) -> MCPServer:
    """Return a server with every tool: each public method of `tools`."""
    server: MCPServer = MCPServer("lachesis", version=__version__, instructions=_INSTRUCTIONS, log_level="WARNING")
    calls = _Calls()
    for name in dir(tools):
        if name.startswith("rl_"):
            server.add_tool(_explained(getattr(tools, name), calls), structured_output=False)
    logging.getLogger("mcp").setLevel(logging.WARNING)
    return server


class _Calls:
    """Counts the calls of all tools that have not ended."""

    open = 0


def _explained(
    tool: Callable[..., Awaitable[dict[str, Any]]], calls: _Calls
) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Return the tool with expected errors as the protocol has them, and a bound of calls at once."""

    @functools.wraps(tool)
    async def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        if calls.open >= _MAX_CALLS:
            raise ToolError(f"{calls.open} calls have not ended yet, and no more are taken: wait for one of them")
        calls.open += 1
        try:
            return await tool(*args, **kwargs)
        except (LachesisError, OSError) as error:
            raise ToolError(without_secrets(str(error))) from error
        finally:
            calls.open -= 1

    return call


async def serve_http(server: MCPServer, host: str, port: int, token: str, started: Callable[[int], None]) -> None:
    """Serve on `host` and `port` (0: a free one) until cancelled; `started` gets the port.

    Raises `StartupError` where the port cannot be had.
    """
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise StartupError(f"--http {host}:{port}: {error.strerror}; port 0 takes a free one") from error
    bound = int(listener.getsockname()[1])
    names = [f"{name}:{bound}" for name in dict.fromkeys((host, "127.0.0.1", "localhost", "[::1]"))]
    security = TransportSecuritySettings(allowed_hosts=names, allowed_origins=[f"http://{name}" for name in names])
    app = server.streamable_http_app(
        streamable_http_path=HTTP_PATH,
        transport_security=security,
        host=host,
        max_sessions=_MAX_SESSIONS,
        session_idle_timeout=_SESSION_S,
    )
    config = uvicorn.Config(
        _TokenCheck(_BodyBound(app), token),
        log_level="warning",
        log_config=None,
        server_header=False,
        http=http_within(_HEAD_S),
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    started(bound)
    with listener:
        await CancellableServer(config).serve_until_cancelled([listener])


class _TokenCheck:
    """Answers 401 to requests without `Authorization: Bearer TOKEN`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                answer = JSONResponse({"error": "send the header Authorization: Bearer TOKEN"}, status_code=401)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _BodyBound:
    """Answers 413 to requests with a large body, and 408 to those whose body does not arrive in time."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message: Message | None = None
        with anyio.move_on_after(_BODY_S):
            message = await _whole(receive)
        if message is None:
            refusal = JSONResponse({"error": f"the body did not arrive within {_BODY_S:g} s"}, 408)
        elif len(message.get("body", b"")) > _MAX_BODY_BYTES:
            refusal = JSONResponse({"error": f"the body has more than {_MAX_BODY_BYTES} bytes"}, 413)
        else:
            await self._app(scope, _after(message, receive), send)
            return
        await refusal(scope, receive, send)


async def _whole(receive: Receive) -> Message:
    """Return the body as one message, cut off where it is too large; what came instead where the client left."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return message
        body += message.get("body", b"")
        if not message.get("more_body", False) or len(body) > _MAX_BODY_BYTES:
            return {"type": "http.request", "body": bytes(body), "more_body": False}


def _after(first: Message, receive: Receive) -> Receive:
    """Return a `receive` that yields `first` before what comes next."""
    waiting = [first]

    async def received() -> Message:
        return waiting.pop() if waiting else await receive()

    return received
