"""Notes how long requests to an inference server are under way, and names a slow one. Pure."""

from lachesis.pipeline.common.usual_times import UsualTimes

__all__ = ["RequestTimes"]

_MIN_SLOW_S = 7.0
"""Seconds from which a request may be slow."""


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

    def describe_slow(self, now_s: float) -> str | None:
        """Return a text about requests that take too long; None: none does."""
        nothing_known = UsualTimes(_MIN_SLOW_S)
        slow = [
            (now_s - began_s, where, route)
            for where, route, began_s in self._under_way.values()
            if now_s - began_s > self._usual.get(route, nothing_known).late_s
        ]
        if not slow:
            return None
        age_s, where, route = max(slow)
        usual_s = self._usual.get(route, nothing_known).slowest_s
        usual = f"the slowest of the last ones took {usual_s:.1f} s" if usual_s else "none was answered yet"
        hang = "1 request hangs" if len(slow) == 1 else f"{len(slow)} requests hang"
        return f"{where} does not answer: {hang}, the longest ({route}) for {age_s:.0f} s; {usual}"
