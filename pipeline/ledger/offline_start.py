"""Where an offline trainer starts, and how stale a rollout is to it. Pure."""

from typing import NamedTuple

__all__ = ["OfflineStart"]


class OfflineStart(NamedTuple):
    """Start of an offline trainer: the weights of optimizer step `start` of the run.

    The staleness of a rollout is then the number of optimizer steps between the policy that made it and the weights
    that train it: those from the one to `start` along the run, either way, and those this trainer has taken since.
    `max_staleness` bounds it; None: nothing does, and it is left to the importance ratio.
    """

    start: int = 0
    max_staleness: int | None = None

    def staleness(self, batch: int, policy_step: int) -> int:
        """Return that of a rollout made by `policy_step` in batch number `batch`."""
        return batch + abs(self.start - policy_step)
