"""The HTTP face of the page: a Starlette application that answers GET and HEAD, and changes nothing.

Guarantees: no script of another page is answered and no foreign name leads here; no answer may load or run anything but
the page's own three files; nothing of the run is shown without the token; every answer is bounded, and
an error is a sentence in JSON.
"""

import hmac
from collections.abc import Awaitable, Callable, Container
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.runtime.http import BrowserGuard
from lachesis.schemas.errors import ConfigError, DataError, LachesisError
from lachesis.services.web.api import Query, RunApi

__all__ = ["HEADERS", "TokenGate", "build_app"]

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""What every answer carries."""
_STATIC = Path(__file__).parent / "static"
_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_ANSWER_S = 30.0
"""Seconds after which a request is given up."""
_READERS = 4
"""Requests that read the history at once; others wait."""
_MAX_QUERY_CHARS = 4096
_MAX_QUERY_FIELDS = 64

Handler = Callable[[Request, Query], Awaitable[Any]]


def build_app(api: RunApi, *, hosts: Container[str] | None, token: str, cookie: str) -> Starlette:
    """Return the application.

    `hosts` as in `BrowserGuard`. `token`: what a client must send once, and then in the cookie called `cookie`.
    """
    readers = anyio.CapacityLimiter(_READERS)
    handlers: dict[str, Handler] = {
        "/api/run": lambda _, query: api.run(query),
        "/api/series": lambda _, query: api.series(query),
        "/api/alerts": lambda _, query: api.alerts(query),
        "/api/revisions": lambda _, query: api.revisions(query),
        "/api/comparison": lambda _, query: api.comparison(query),
        "/api/groups": lambda _, query: api.groups(query),
        "/api/groups/{group}": lambda request, query: api.group(query, request.path_params["group"]),
    }
    routes = [Route(path, partial(_answer, handler, readers), methods=["GET"]) for path, handler in handlers.items()]
    routes += [Route(path, partial(_file, *file), methods=["GET"]) for path, file in _FILES.items()]
    middleware = [
        Middleware(PageHeaders),
        Middleware(BrowserGuard, hosts=hosts, refuse=lambda why: _error(403, why), has_pages=True),
        Middleware(TokenGate, token=token, cookie=cookie),
        Middleware(GZipMiddleware, minimum_size=1000),
    ]
    return Starlette(routes=routes, middleware=middleware)


class PageHeaders:
    """An ASGI application that adds `HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, sent if scope["type"] == "http" else send)


class TokenGate:
    """An ASGI application that answers for the run to those alone who have the token.

    The token in an address, `/?token=...`, is exchanged for a cookie, and leaves the address. The page's own files
    hold nothing of the run and need none, so that a link to a group works from elsewhere, too.
    """

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self._app = app
        self._token = token
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            request = Request(scope)
            given = request.query_params.get("token")
            if given is not None:
                app = self._exchanged() if self._is_right(given) else _error(401, "this is not the token of this page")
            elif scope["path"].startswith("/api") and not self._is_right(request.cookies.get(self._cookie, "")):
                app = _error(401, "open the address with the token that `lachesis web` printed")
        await app(scope, receive, send)

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _exchanged(self) -> Response:
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return answer


async def _file(name: str, kind: str, _: Request) -> Response:
    return FileResponse(_STATIC / name, media_type=kind, headers={"Cache-Control": "no-cache"})


async def _answer(handler: Handler, readers: anyio.CapacityLimiter, request: Request) -> Response:
    """Turn a handler's value into JSON, and its errors into sentences."""
    try:
        query = _query(request.url.query)
        with anyio.fail_after(_ANSWER_S):
            async with readers:
                return _json(200, await handler(request, query))
    except NotFoundError as error:
        return _error(404, str(error))
    except ConfigError as error:
        return _error(400, str(error))
    except DataError as error:
        return _error(422, str(error))
    except LachesisError as error:
        return _error(503, str(error))
    except TimeoutError:
        return _error(503, f"the run's server did not answer in {_ANSWER_S:g} s")


def _query(text: str) -> Query:
    if len(text) > _MAX_QUERY_CHARS:
        raise ConfigError(f"the query has {len(text)} characters; at most {_MAX_QUERY_CHARS} are read")
    try:
        return parse_qs(text, keep_blank_values=True, max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError as error:
        raise ConfigError(f"the query cannot be read: {error}") from error


def _json(status: int, value: Any) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(msgspec.json.encode(value), status, headers=headers, media_type="application/json")


def _error(status: int, why: str) -> Response:
    return _json(status, {"error": why[:2000]})
