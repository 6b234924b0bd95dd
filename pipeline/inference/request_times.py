"""Notes how long requests to an inference server are under way, and names a slow one. Pure."""

from typing import Final

from lachesis.pipeline.common.usual_times import UsualTimes

__all__ = ["SLOW_SERVER_CURE", "RequestTimes"]

SLOW_SERVER_CURE: Final = (
    "look at that server, and at what stands before it; a request is given up after its time-out, and sent again"
)

_MIN_SLOW_S = 7.0
"""Seconds from which a request may be slow."""
_NOTHING_KNOWN = UsualTimes(_MIN_SLOW_S)


class RequestTimes:
    """The requests to one role's servers that are under way, and how long the last ones on each route took."""

    def __init__(self) -> None:
        self._under_way: dict[object, tuple[str, str, float]] = {}
        self._usual: dict[str, UsualTimes] = {}

    def begin(self, request: object, where: str, route: str, now_s: float) -> None:
        """Note that a request to the server called `where` was sent; sending it again restarts its time."""
        self._under_way[request] = where, route, now_s

    def end(self, request: object, now_s: float, *, answered: bool) -> None:
        """Note that it is over, and whether it was answered; one that was never sent is left out."""
        _, route, began_s = self._under_way.pop(request, ("", "", now_s))
        if answered and route:
            self._usual.setdefault(route, UsualTimes(_MIN_SLOW_S)).add(now_s - began_s, now_s)

    def pass_over(self, seconds: float) -> None:
        """Leave out a time in which no answer could be heard."""
        self._under_way = {
            request: (where, route, began_s + seconds) for request, (where, route, began_s) in self._under_way.items()
        }

    def are_all_slow(self, now_s: float) -> bool:
        """Return whether there are requests, and all of them take too long: then nothing goes on."""
        return bool(self._under_way) and len(self._slow(now_s)) == len(self._under_way)

    def describe_slow(self, now_s: float) -> str | None:
        """Return a text about requests that take too long; None: none does."""
        slow = self._slow(now_s)
        if not slow:
            return None
        age_s, where, route = max(slow)
        usual_s = self._usual.get(route, _NOTHING_KNOWN).slowest_s
        usual = f"the slowest of the last ones took {usual_s:.1f} s" if usual_s else "none was answered yet"
        hang = "1 request hangs" if len(slow) == 1 else f"{len(slow)} requests hang"
        return f"{where} does not answer: {hang}, the longest ({route}) for {age_s:.0f} s; {usual}"

    def _slow(self, now_s: float) -> list[tuple[float, str, str]]:
        """Return age, server and route of the requests that take too long."""
        return [
            (now_s - began_s, where, route)
            for where, route, began_s in self._under_way.values()
            if now_s - began_s > self._usual.get(route, _NOTHING_KNOWN).late_s
        ]
