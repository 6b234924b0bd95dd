"""Notes how long requests to an inference server are under way, and names a slow one. Pure."""

from collections import deque

__all__ = ["RequestTimes"]

_MIN_SLOW_S = 8.0
"""Seconds from which a request may be slow."""
_UNKNOWN_SLOW_S = 60.0
"""The same while little is known of what is usual."""
_SLOW_FACTOR = 10
"""So many times as long as the slowest of the last ones took, a request is slow."""
_KNOWN_AFTER = 8
_REMEMBERED = 64


class RequestTimes:
    """The requests to one role's servers that are under way, and how long the last ones on each route took."""

    def __init__(self) -> None:
        self._under_way: dict[object, tuple[str, str, float]] = {}
        self._took_s: dict[str, deque[float]] = {}

    def begin(self, request: object, where: str, route: str, now_s: float) -> None:
        """Note that a request to the server called `where` was sent; sent once more, it begins anew."""
        self._under_way[request] = where, route, now_s

    def end(self, request: object, now_s: float, *, answered: bool) -> None:
        """Note that it is over, and whether it was answered; one that was never sent is left out."""
        _, route, began_s = self._under_way.pop(request, ("", "", now_s))
        if answered and route:
            self._took_s.setdefault(route, deque(maxlen=_REMEMBERED)).append(now_s - began_s)

    def describe_slow(self, now_s: float) -> str | None:
        """Return what to say of requests that take too long; None: none does."""
        slow = []
        for where, route, began_s in self._under_way.values():
            took_s = self._took_s.get(route, ())
            usual_s = max(took_s, default=0.0)
            least_s = _MIN_SLOW_S if len(took_s) >= _KNOWN_AFTER else _UNKNOWN_SLOW_S
            if now_s - began_s > max(least_s, _SLOW_FACTOR * usual_s):
                slow.append((now_s - began_s, where, route, usual_s))
        if not slow:
            return None
        age_s, where, route, usual_s = max(slow)
        usual = f"the slowest of the last ones took {usual_s:.1f} s" if usual_s else "none was answered yet"
        hang = "1 request hangs" if len(slow) == 1 else f"{len(slow)} requests hang"
        return f"{where} does not answer: {hang}, the longest ({route}) for {age_s:.0f} s; {usual}"
