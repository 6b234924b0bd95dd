"""One HTTP request whose whole answer must come within a time and a number of bytes.

The time limits of HTTP libraries hold for each read, so a server that sends a byte now and then is waited for for ever.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import httpx

from lachesis.pipeline.errors import InfrastructureError

__all__ = ["get_within", "wait_for_thread"]

T = TypeVar("T")


async def get_within(
    client: httpx.AsyncClient, url: str, *, within_s: float, most_bytes: int, **arguments: Any
) -> bytes:
    """Return the body of a successful answer.

    Raises `InfrastructureError` where it does not come whole within `within_s` seconds, has more than `most_bytes`, or
    is no success.
    """
    data = bytearray()
    try:
        with anyio.fail_after(within_s):
            async with client.stream("GET", url, **arguments) as response:
                response.raise_for_status()
                async for part in response.aiter_bytes():
                    data += part
                    if len(data) > most_bytes:
                        raise InfrastructureError(f"it answers more than {most_bytes} bytes")
    except TimeoutError as error:
        raise InfrastructureError(f"no whole answer within {within_s:g} s, after {len(data)} bytes of it") from error
    except httpx.HTTPError as error:
        raise InfrastructureError(f"{type(error).__name__}: {error}") from error
    return bytes(data)


def wait_for_thread(work: Callable[[], T], within_s: float) -> T | None:
    """Return what `work` returns, None if it takes longer; it goes on in its thread then.

    Raises what it raises.
    """
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(within_s)
    if errors:
        raise errors[0]
    return found[0] if found else None
