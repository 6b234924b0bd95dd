"""Where an offline trainer starts, and how stale a rollout is to it. Pure."""

from typing import NamedTuple

__all__ = ["OfflineStart"]


class OfflineStart(NamedTuple):
    """Start of an offline trainer: the weights of optimizer step `start` of the run.

    Staleness of a rollout = |policy step - `start`| + optimizer steps that this trainer has taken since.
    `max_staleness` bounds it. None: no bound; the importance ratio corrects for staleness.
    """

    start: int = 0
    max_staleness: int | None = None

    def staleness(self, batch: int, policy_step: int) -> int:
        """Return the staleness of a rollout made by `policy_step` in batch number `batch`."""
        return batch + abs(self.start - policy_step)
