"""Counts the requests of clients without the gateway's token, and reports them while they come. Pure."""

__all__ = ["RefusedClients"]

_SAID_S = 8.0
"""Seconds after the newest such request for which it is said: a client that tries again does so sooner."""
_PATH_CHARS = 40


class RefusedClients:
    """The requests that were refused for their token; times are seconds of a clock that does not jump."""

    def __init__(self) -> None:
        self.count = 0
        self._path = ""
        self._newest_s = float("-inf")

    def record(self, path: str, now_s: float) -> None:
        """Record a request for `path` without the token, or with another."""
        self.count, self._path, self._newest_s = self.count + 1, path[:_PATH_CHARS], now_s

    def describe(self, now_s: float) -> str | None:
        """Return the message to report now; None: nothing."""
        if now_s - self._newest_s > _SAID_S:
            return None
        return (
            f"{self.count} requests came without the gateway's token, or with another, and were refused; the newest "
            f"was for {self._path!r}"
        )
