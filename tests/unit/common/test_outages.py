"""What says that a service is away: real exceptions of the clients at hand, lookalikes of the others'."""

import asyncio
import concurrent.futures.process
import errno
import http.client
import io
import socket
import ssl
import subprocess
import urllib.error
import urllib.request

import anyio
import httpx
import pytest
import requests
import urllib3

from lachesis import RaterUnavailable, ToolError
from lachesis.pipeline.common.outages import is_outage
from lachesis.pipeline.errors import InfrastructureError
from lachesis.schemas.errors import DataError


def lookalike(module, *names, **attributes):
    """Make an error whose classes have these names, the base first, in `module`."""
    kind = Exception
    for name in names:
        kind = type(name, (kind,), {"__module__": module})
    error = kind("no")
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def response(status):
    return httpx.Response(status, request=httpx.Request("GET", "http://judge"))


def http_status(status):
    return httpx.HTTPStatusError("no", request=response(status).request, response=response(status))


def requests_status(status):
    found = requests.Response()
    found.status_code = status
    return requests.HTTPError(response=found)


def url_status(status):
    return urllib.error.HTTPError("http://judge", status, "no", http.client.HTTPMessage(), io.BytesIO())


AWAY = [
    InfrastructureError("x"), RaterUnavailable("x"),
    ConnectionError(), ConnectionRefusedError(), ConnectionResetError(),
    TimeoutError(), socket.gaierror(-2, "no such name"),
    asyncio.IncompleteReadError(b"", 4), ssl.SSLError("handshake"), OSError(errno.EHOSTUNREACH, "no route"),
    OSError(errno.ENETUNREACH, "no net"), OSError("Multiple exceptions: [Errno 111] a, [Errno 111] b"),
    http.client.RemoteDisconnected(), http.client.IncompleteRead(b""), http.client.BadStatusLine("x"),
    httpx.ConnectError("x"), httpx.ConnectTimeout("x"), httpx.ReadTimeout("x"), httpx.PoolTimeout("x"),
    httpx.ReadError("x"), httpx.RemoteProtocolError("x"), httpx.ProxyError("x"),
    requests.ConnectionError(), requests.ConnectTimeout(), requests.ReadTimeout(),
    requests.exceptions.ChunkedEncodingError(), requests.exceptions.SSLError(),
    urllib3.exceptions.ProtocolError("x"), urllib3.exceptions.ConnectTimeoutError(),
    urllib3.exceptions.MaxRetryError(None, "/", urllib3.exceptions.NewConnectionError(None, "x")),
    urllib.error.URLError(ConnectionRefusedError()), urllib.error.URLError(socket.gaierror(-2, "x")),
    *(make(status) for make in (http_status, requests_status, url_status) for status in (408, 429, 500, 503, 529)),
    lookalike("aiohttp.client_exceptions", "ClientError", "ClientConnectionError", "ServerDisconnectedError"),
    lookalike("aiohttp.client_exceptions", "ClientError", "ClientPayloadError"),
    lookalike("aiohttp.client_exceptions", "ClientError", "ClientResponseError", status=502),
    lookalike("openai", "APIError", "APIConnectionError", "APITimeoutError"),
    lookalike("openai", "APIError", "APIStatusError", "RateLimitError", status_code=429),
    lookalike("openai._exceptions", "APIError", "APIStatusError", "InternalServerError", status_code=500),
    ExceptionGroup("both", [ConnectionRefusedError(), ExceptionGroup("in", [TimeoutError()])]),
]  # fmt: skip
NOT_AWAY = [
    ValueError("x"), KeyError("x"), TypeError(), AttributeError(), AssertionError(), RuntimeError(), SystemExit(1),
    MemoryError(), RecursionError(), FileNotFoundError(errno.ENOENT, "x"), PermissionError(),
    OSError(errno.ENOSPC, "x"),
    OSError("text"), BrokenPipeError(), EOFError(), subprocess.TimeoutExpired("x", 1), DataError("x"), ToolError("x"),
    httpx.UnsupportedProtocol("x"), httpx.LocalProtocolError("x"), httpx.TooManyRedirects("x"), httpx.InvalidURL("x"),
    requests.exceptions.InvalidURL(), requests.exceptions.MissingSchema(),
    requests.exceptions.JSONDecodeError("x", "", 0),
    requests.HTTPError(), urllib.error.URLError("unknown url type: judge"), http.client.CannotSendRequest(),
    urllib3.exceptions.LocationParseError("x"), urllib.error.URLError(FileNotFoundError()),
    *(make(status) for make in (http_status, requests_status, url_status) for status in (400, 401, 404, 422)),
    lookalike("aiohttp.client_exceptions", "ClientError", "InvalidURL"),
    lookalike("aiohttp.client_exceptions", "ClientError", "ClientResponseError", status=404),
    lookalike("openai", "APIError", "APIStatusError", "BadRequestError", status_code=400),
    lookalike("mine", "ConnectError"), lookalike("mine", "APIStatusError", status_code=503),
    anyio.BrokenResourceError(), anyio.BrokenWorkerProcess(), concurrent.futures.process.BrokenProcessPool(),
    ExceptionGroup("one of two", [ConnectionRefusedError(), ValueError()]),
]  # fmt: skip


@pytest.mark.parametrize("error", AWAY, ids=repr)
def test_it_says_that_something_is_away(error):
    assert is_outage(error)


@pytest.mark.parametrize("error", NOT_AWAY, ids=repr)
def test_it_is_the_raters_own(error):
    assert not is_outage(error)


def raised(how):
    try:
        how()
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError


def connect():
    raise httpx.ConnectError("refused")


def test_what_it_was_raised_from_counts():
    def wrapped():
        try:
            connect()
        except httpx.ConnectError as error:
            raise RuntimeError("the judge failed") from error

    def meanwhile():
        try:
            connect()
        except httpx.ConnectError:
            return int("nothing to fall back to")

    def unlinked():
        try:
            connect()
        except httpx.ConnectError:
            raise ValueError("no score in the answer") from None

    def refused():
        try:
            connect()
        except httpx.ConnectError as error:
            raise DataError("this sample is bad, whatever the judge says") from error

    def ended():
        try:
            connect()
        except httpx.ConnectError as error:
            raise anyio.BrokenWorkerProcess from error

    assert not is_outage(raised(ended))
    assert is_outage(raised(wrapped))
    assert is_outage(raised(meanwhile))
    assert not is_outage(raised(unlinked))
    assert not is_outage(raised(refused))


def test_a_ring_of_causes_ends():
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = other, one
    assert not is_outage(one)
    group = ExceptionGroup("g", [ValueError()])
    for _ in range(2000):
        group = ExceptionGroup("g", [group])
    assert not is_outage(group)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.outside
@pytest.mark.parametrize(
    "ask",
    [
        lambda url, _: httpx.get(url, trust_env=False),
        lambda url, _: requests.Session().get(url, proxies={"no_proxy": "*"}),
        lambda url, _: urllib3.PoolManager(retries=False).request("GET", url),
        lambda url, _: urllib3.PoolManager(retries=1).request("GET", url),
        lambda url, _: urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url),
        lambda _, port: http.client.HTTPConnection("127.0.0.1", port).request("GET", "/"),
        lambda _, port: socket.create_connection(("127.0.0.1", port)),
        lambda _, port: asyncio.run(asyncio.open_connection("127.0.0.1", port)),
    ],
)
def test_clients_that_find_nobody(ask):
    port = free_port()
    assert is_outage(raised(lambda: ask(f"http://127.0.0.1:{port}/", port)))
