"""Sends requests of raters to a server, and sorts failures by what they mean."""

from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import msgspec

from lachesis.pipeline.common.proxies import describe_proxy, is_on_this_machine
from lachesis.pipeline.common.secrets import MASK, without_secrets
from lachesis.pipeline.errors import InfrastructureError, UnreadableAnswerError
from lachesis.schemas.errors import ConfigError

__all__ = ["RefusedError", "check_rater_url", "open_client", "post_json"]

_MAX_TIMEOUT_S = 600.0
"""Beyond every time limit of a rater, which is what ends a request."""

_MAX_REPLY_BYTES = 1 << 20
_MAX_SHOWN_CHARS = 100
_BUSY = 429


class RefusedError(Exception):
    """Raised when a server refuses a request for good: the rating is missing, and asking again would not help."""


def check_rater_url(url: str, rater: str) -> None:
    """Raise `ConfigError` where `url` is no address of an HTTP server."""
    shown = without_secrets(url)[:200]
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"rater {rater}: url {shown!r} is no URL: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.host:
        raise ConfigError(f"rater {rater}: url is {shown!r}; use http://HOST:PORT/v1, or https://")


def open_client(url: str, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """Return a client for the server at `url`, which stays open as long as the process."""
    # a proxy leads elsewhere
    return httpx.AsyncClient(headers=headers, timeout=_MAX_TIMEOUT_S, trust_env=not is_on_this_machine(url))


async def post_json(client: httpx.AsyncClient, url: str, body: object) -> Any:
    """Post JSON and return the JSON that came back.

    Raises `InfrastructureError` when the server is down, busy or broken, or answers what is no JSON (the rating is
    tried again), `RefusedError` when it refuses the request. What they say holds no credentials: servers that refuse a
    key tend to repeat it.
    """
    place = without_secrets(url) + describe_proxy(url)
    try:
        async with client.stream("POST", url, content=msgspec.json.encode(body)) as response:
            data = b""
            async for part in response.aiter_bytes():
                data += part
                if len(data) > _MAX_REPLY_BYTES:
                    shown = _shown([client.headers, response.request.headers], data)
                    raise UnreadableAnswerError(f"{place} answered more than {_MAX_REPLY_BYTES} bytes: {shown}")
    except httpx.HTTPError as error:
        raise InfrastructureError(f"{place}: {type(error).__name__}: {without_secrets(str(error))}") from error
    shown = _shown([client.headers, response.request.headers], data)
    if response.status_code == _BUSY or response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise InfrastructureError(f"{place} answered {response.status_code}: {shown}")
    if (response.status_code < 400 and response.status_code != httpx.codes.OK) or _is_html(response, data):
        raise UnreadableAnswerError(f"{place} answered {response.status_code}: {shown}")
    if response.status_code != httpx.codes.OK:
        raise RefusedError(f"{place} answered {response.status_code}: {shown}")
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise UnreadableAnswerError(f"{place} answered what is no JSON: {shown}") from error


def _is_html(response: httpx.Response, data: bytes) -> bool:
    """Return whether a page answers, of something that stands before the server."""
    return "html" in response.headers.get("content-type", "") or data.lstrip()[:1] == b"<"


def _shown(sent: Iterable[httpx.Headers], data: bytes) -> str:
    """Return the beginning of an answer, without the keys in the headers that were sent."""
    text = data.decode(errors="replace")
    for headers in sent:  # a password in the address takes the place of the client's key
        _, _, key = headers.get("authorization", "").partition(" ")
        text = text.replace(key, MASK) if key else text
    return repr(without_secrets(text)[:_MAX_SHOWN_CHARS])
