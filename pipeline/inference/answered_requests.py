"""Remembers an answered request of each route, to see if a refusal is the server's fault. Pure.

A status of 4xx says that the request is bad. If the server, or a proxy before it, now refuses a request that was
answered before, the status says nothing about the request.
"""

__all__ = ["AnsweredRequests"]

_MAX_BYTES = 64 << 10
"""Bytes of a request that is remembered."""


class AnsweredRequests:
    """The smallest answered body of each route."""

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}

    def add(self, path: str, body: bytes) -> None:
        """Note that a body was answered."""
        known = self._bodies.get(path)
        if len(body) <= _MAX_BYTES and (known is None or len(body) < len(known)):
            self._bodies[path] = body

    def get(self, path: str) -> bytes | None:
        """Return an answered request of the route; None: there is none."""
        return self._bodies.get(path)
