"""Finds silent environments of other projects, by how often each sends requests. Pure."""

from dataclasses import dataclass

__all__ = ["HeardClients"]

_START_S = 5.0
"""Seconds after the start in which no environment counts as silent."""
_SILENT_S = 20.0
"""Minimum seconds without a request before silence; atroposlib's environments request their status ten times a
second."""
_UNKNOWN_S = 120.0
"""Seconds of silence while little is known of how often an environment sends requests."""
_KNOWN_AFTER = 16
"""Requests after which its usual pauses are known."""
_USUAL_PAUSES = 3.0
"""Times the longest recent pause."""
_FADES = 0.995
"""Factor by which a pause counts less with each request after it."""
_MAX_SILENT_S = 1800.0


@dataclass(slots=True)
class _Client:
    heard_s: float
    requests: int = 1
    pause_s: float = 0.0


class HeardClients:
    """When each environment sent requests; times are seconds of a clock that does not jump."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._clients: dict[str, _Client] = {}

    def hear(self, env: str, now_s: float) -> None:
        """Record a request of `env`."""
        client = self._clients.get(env)
        if client is None:
            self._clients[env] = _Client(now_s)
            return
        client.pause_s = max(now_s - client.heard_s, _FADES * client.pause_s)
        client.heard_s, client.requests = now_s, client.requests + 1

    def was_heard(self, env: str) -> bool:
        """Return whether an environment has sent a request."""
        return env in self._clients

    def is_silent(self, env: str, now_s: float) -> bool:
        """Return whether `env` has sent no request for longer than is usual for it."""
        client = self._clients.get(env)
        if client is None:
            return now_s > self._since_s + _START_S
        allowed_s = _UNKNOWN_S
        if client.requests >= _KNOWN_AFTER:
            allowed_s = min(_MAX_SILENT_S, max(_SILENT_S, _USUAL_PAUSES * client.pause_s))
        return now_s > client.heard_s + allowed_s
