"""Remembers which code blocked a process, and logs each once."""

import logging
from dataclasses import dataclass

__all__ = ["SlowCode"]

log = logging.getLogger("lachesis")

_REMEMBERED_S = 60.0
_MAX_REMEMBERED = 256


@dataclass(slots=True)
class _SlowCall:
    ended_s: float
    longest_s: float = 0.0


class SlowCode:
    """Code by name, with how long it took. `held`: what it held; `cure`: how to change it."""

    def __init__(self, held: str, cure: str) -> None:
        self._held = held
        self._cure = cure
        self._calls: dict[str, _SlowCall] = {}

    def record(self, name: str, ended_s: float, took_s: float) -> None:
        """Take in a call that took long; the first of a name is logged."""
        one = self._calls.get(name)
        if one is None:
            log.warning("%s held %s for %.1f s, in which nothing else ran: %s", name, self._held, took_s, self._cure)
            if len(self._calls) >= _MAX_REMEMBERED:
                del self._calls[min(self._calls, key=lambda key: self._calls[key].ended_s)]
        if one is None or ended_s - one.ended_s > _REMEMBERED_S:
            one = self._calls[name] = _SlowCall(ended_s)
        one.ended_s, one.longest_s = ended_s, max(one.longest_s, took_s)

    def describe(self, now_s: float) -> str | None:
        """Return what to say of calls within the last minute; None: there were none."""
        found = [
            f"{name} takes up to {one.longest_s:.1f} s"
            for name, one in list(self._calls.items())  # another thread may record meanwhile
            if now_s - one.ended_s <= _REMEMBERED_S
        ]
        return f"{', '.join(found[:3])}, in which nothing else of its process runs" if found else None
