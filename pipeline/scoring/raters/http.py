"""Requests of raters that ask a server, sorted by what their failure means."""

from typing import Any

import httpx
import msgspec

from lachesis.schemas.errors import InfrastructureError

__all__ = ["MAX_TIMEOUT_S", "RefusedError", "post_json"]

MAX_TIMEOUT_S = 600.0
"""Beyond every time limit of a rater, which is what ends a request."""

_MAX_REPLY_BYTES = 1 << 20
_BUSY = 429


class RefusedError(Exception):
    """Raised when a server refuses a request for good: the rating is missing, and asking again would not help."""


async def post_json(client: httpx.AsyncClient, url: str, body: object) -> Any:
    """Post JSON and return the JSON that came back.

    Raises `InfrastructureError` when the server is down, busy or broken (the rating is tried again), `RefusedError`
    when it refuses the request or answers what is no JSON.
    """
    try:
        async with client.stream("POST", url, content=msgspec.json.encode(body)) as response:
            data = b""
            async for part in response.aiter_bytes():
                data += part
                if len(data) > _MAX_REPLY_BYTES:
                    raise RefusedError(f"{url} answered more than {_MAX_REPLY_BYTES} bytes")
    except httpx.HTTPError as error:
        raise InfrastructureError(f"{url}: {type(error).__name__}: {error}") from error
    if response.status_code == _BUSY or response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise InfrastructureError(f"{url} answered {response.status_code}: {data[:200]!r}")
    if response.status_code != httpx.codes.OK:
        raise RefusedError(f"{url} answered {response.status_code}: {data[:200]!r}")
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise RefusedError(f"{url} answered what is no JSON: {data[:200]!r}") from error
