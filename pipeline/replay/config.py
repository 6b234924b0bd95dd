"""How fast a replay may go. None of it changes what comes out, so it is no part of a revision."""

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["Pace"]

_IN_FLIGHT = 32
_LARGEST_BLOCK = 16


class Pace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a replay may take of the machine and of the services behind its raters."""

    max_rate: Annotated[float, Meta(gt=0)] | None = None
    """Groups a second. Default None: as fast as it goes."""
    max_inflight: Annotated[int, Meta(ge=1)] | None = None
    """Groups that are read and not yet folded, of all workers together. Default None: 32 for each worker."""
    workers: Annotated[int, Meta(ge=1)] = 1
    """Processes that read and judge. Default 1: the replay's own. With more, it only folds what they judged."""

    @property
    def in_flight(self) -> int:
        """Groups that may be read and not yet folded."""
        return self.max_inflight or _IN_FLIGHT * self.workers

    @property
    def block(self) -> int:
        """Groups that a worker is asked for at once: few enough that it may have two blocks in flight, and that by
        `max_rate` ten blocks a second are asked for."""
        most = min(_LARGEST_BLOCK, self.in_flight // (2 * self.workers))
        if self.max_rate is not None:
            most = min(most, int(self.max_rate / 10))
        return max(1, most)
