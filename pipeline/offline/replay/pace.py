"""Limits how fast a replay goes. None of it changes the result, so it is no part of a revision."""

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["ReplayPace"]

_DEFAULT_IN_FLIGHT_WAITING = 32
"""Groups in flight for each process where raters have to be waited for: a pause waits for all of them."""
_DEFAULT_IN_FLIGHT = 512
"""Where none has to be: a server hands out few long stretches with much less work than many short ones."""


class ReplayPace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a replay may take of the machine and of the services behind its raters."""

    max_rate: Annotated[float, Meta(gt=0)] | None = None
    """Groups a second. Default None: as fast as it goes."""
    max_inflight: Annotated[int, Meta(ge=1)] | None = None
    """Groups that are read and not yet folded, of all workers together. Default None: 32 for each process where raters
    have to be waited for, 512 where none has to be."""
    workers: Annotated[int, Meta(ge=1)] = 1
    """Processes that read and score. Default 1: the replay's own. With more, it only folds what they scored."""

    def in_flight(self, *, waits: bool) -> int:
        """Return how many groups may be read and not yet folded.

        `waits`: whether scoring them waits for something.
        """
        return self.max_inflight or (_DEFAULT_IN_FLIGHT_WAITING if waits else _DEFAULT_IN_FLIGHT) * self.workers

    def block(self, *, waits: bool) -> int:
        """Return how many groups a worker gets at once.

        Few enough that it may have two blocks in flight, and that `max_rate` is reached with ten blocks a second.
        """
        most = self.in_flight(waits=waits) // (2 * self.workers)
        if self.max_rate is not None:
            most = min(most, int(self.max_rate / 10))
        return max(1, most)
