"""How much of the bonuses is in force: a function of the highest success rate, in order of the record alone."""

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.normalizer.config.shaping import RewardConfig
from lachesis.pipeline.normalizer.logic.bonus_fade import MIN_GROUPS, SuccessPeaks, scale


@pytest.mark.parametrize(
    ("peak", "share"), [(None, 1.0), (0.0, 1.0), (0.1, 1.0), (0.2, 0.5), (0.25, 0.25), (0.3, 0.0), (1.0, 0.0)]
)
def test_bonuses_fade_between_the_two_rates(peak, share):
    assert scale(RewardConfig(), peak) == pytest.approx(share)


@pytest.mark.parametrize(
    ("peak", "so_far", "share"),
    [(None, 0.2, 0.5), (None, 0.9, 0.0), (None, 0.0, 1.0), (0.2, 0.9, 0.5), (0.2, 0.0, 0.5)],
)
def test_before_the_highest_rate_is_known_the_rate_so_far_counts(peak, so_far, share):
    assert scale(RewardConfig(), peak, so_far) == pytest.approx(share)


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 200), st.integers(0, 200), st.integers(1, MIN_GROUPS)), max_size=30
    ),
    st.integers(1, 9),
)
def test_the_peak_is_the_highest_rate_of_the_newest_windows_and_never_falls(windows, reach):
    peaks, counts, window, best, told = SuccessPeaks(reach), {}, -1, None, {}
    for gap, successes, more, groups in windows:
        window += gap
        counts[window] = (successes, successes + more + 1, groups)
        peaks.fold(window, counts)
        near = sorted((w for w in counts if window - reach < w), reverse=True)
        enough = [n for n in range(1, len(near) + 1) if sum(counts[w][2] for w in near[:n]) >= MIN_GROUPS]
        if enough:
            taken = [counts[w] for w in near[: enough[0]]]
            rate = Fraction(sum(one[0] for one in taken), sum(one[1] for one in taken))
            best = rate if best is None else max(best, rate)
        told[window] = best
        peaks.forget(window - 2)
        for w in (window - 2, window - 1, window):
            known = [told[u] for u in told if u <= w]
            expected = known[-1] if known else None
            assert peaks.after(w) == (None if expected is None else float(expected))
    assert len(peaks.peaks) <= 4


@pytest.mark.parametrize("groups", [1, 3, 64])
def test_chance_does_not_end_the_bonuses_of_an_environment_that_hardly_succeeds(groups):
    """5 % of the items always succeed, the others never: 200 windows with so many groups of 8 samples in each."""
    rng, peaks, counts = random.Random(groups), SuccessPeaks(256), {}
    for window in range(200):
        right = sum(rng.random() < 0.05 for _ in range(groups))
        counts[window] = (8 * right, 8 * groups, groups)
        peaks.fold(window, counts)
    assert scale(RewardConfig(), peaks.after(199)) >= 0.8
