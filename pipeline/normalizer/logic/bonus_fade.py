"""Computes how much of the bonuses is in force.

The part falls as the highest success rate of an environment rises, and never grows again.

Given by window the numbers of successful samples, samples and groups, it returns the highest rate up to a window. Each
rate is taken over as many of the newest windows as hold `MIN_GROUPS` groups: samples of one group succeed together, and
the highest of many rates over few groups would soon be high by chance. Windows are fed in order and by number, so
neither arrival nor restarts matter; the sums are integers.
"""

from collections.abc import Mapping

from lachesis.pipeline.normalizer.config.shaping import RewardConfig

__all__ = ["MIN_GROUPS", "SuccessPeaks", "scale"]

MIN_GROUPS = 128
"""Groups that a success rate needs."""


def scale(config: RewardConfig, peak: float | None, so_far: float | None = None) -> float:
    """Return s in [0, 1], by the highest success rate, or else by the rate over fewer groups.

    Bonuses are for the start of a run, before anything succeeds: where no rate is known at all, they are in force.
    """
    rate = so_far if peak is None else peak
    return 1.0 if rate is None else min(1.0, max(0.0, (config.fade_to - rate) / (config.fade_to - config.fade_from)))


class SuccessPeaks:
    """The highest success rate up to each of the newest windows. No rate looks back further than `reach` windows."""

    def __init__(self, reach: int) -> None:
        self._reach = reach
        self.peaks: dict[int, float] = {}

    def fold(self, window: int, counts: Mapping[int, tuple[int, int, int]]) -> None:
        """Close `window`; `counts` has (successes, samples, groups) of it and of those before, by window."""
        successes = samples = groups = 0
        for near in sorted((w for w in counts if window - self._reach < w <= window), reverse=True):
            more = counts[near]
            successes, samples, groups = successes + more[0], samples + more[1], groups + more[2]
            if groups >= MIN_GROUPS:  # a quotient of integers is correctly rounded
                self.peaks[window] = max(self.after(window) or 0.0, successes / samples)
                return

    def after(self, window: int) -> float | None:
        """Return the highest rate up to `window`, None before there is one."""
        return self.peaks[known] if (known := self._last(window)) is not None else None

    def forget(self, before: int) -> None:
        """Drop counts that no window from `before` on refers to."""
        kept = self._last(before)
        self.peaks = {w: peak for w, peak in self.peaks.items() if kept is None or w >= kept}

    def _last(self, window: int) -> int | None:
        return max((w for w in self.peaks if w <= window), default=None)
