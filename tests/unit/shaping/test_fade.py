"""How much of the bonuses is in force: a function of the highest success rate, in order of the record alone."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.shaping.config import RewardConfig
from lachesis.pipeline.shaping.logic.fade import FEWEST, SuccessPeaks, scale


@pytest.mark.parametrize(
    ("peak", "share"), [(None, 0.0), (0.0, 1.0), (0.1, 1.0), (0.2, 0.5), (0.25, 0.25), (0.3, 0.0), (1.0, 0.0)]
)
def test_bonuses_fade_between_the_two_rates(peak, share):
    assert scale(RewardConfig(), peak) == pytest.approx(share)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40), st.integers(0, 40)), max_size=30), st.integers(1, 9))
def test_the_peak_is_the_highest_rate_of_the_newest_windows_and_never_falls(windows, reach):
    peaks, counts, window, best, told = SuccessPeaks(reach), {}, -1, None, {}
    for gap, successes, more in windows:
        window += gap
        counts[window] = (successes, successes + more)
        peaks.fold(window, counts)
        near = [counts[w] for w in counts if window - reach < w]
        samples = sum(n for _, n in near)
        if samples >= FEWEST:
            rate = Fraction(sum(k for k, _ in near), samples)
            best = rate if best is None else max(best, rate)
        told[window] = best
        peaks.forget(window - 2)
        for w in (window - 2, window - 1, window):
            known = [told[u] for u in told if u <= w]
            expected = known[-1] if known else None
            assert peaks.after(w) == (None if expected is None else float(expected))
    assert len(peaks.peaks) <= 4
