"""Decides which steps that are too large make a checkpoint, so health learns of them at once. Pure."""

__all__ = ["LargeSteps"]

_URGENT = 2
"""The health checks inform of the first and warn of the second; later ones change nothing and wait."""
_FINE_STEPS = 8
"""Steps in a row within the bound after which the next one beyond it is the first again."""


class LargeSteps:
    """Follows the steps of one life of the trainer. `large`: whether the last one was too large."""

    def __init__(self) -> None:
        self.large = False
        self._reported = 0
        self._fine = 0

    @property
    def urgent(self) -> bool:
        """Whether the last step is one of the first two that are too large, which do not wait to be reported."""
        return self.large and self._reported < _URGENT

    def record(self, *, large: bool) -> None:
        """Take in a step."""
        self.large = large
        self._fine = 0 if large else self._fine + 1
        if self._fine == _FINE_STEPS:
            self._reported = 0

    def mark_reported(self) -> None:
        """Take in that the steps so far are about to be reported."""
        self._reported += self.large
