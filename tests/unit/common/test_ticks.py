"""What is done again and again is done at the same moments in all processes of a machine."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.common.ticks import seconds_to_tick, sleep_until_tick


@pytest.mark.parametrize(("now_s", "left_s"), [(12.25, 0.75), (12.0, 1.0), (0.0, 1.0), (7.5, 0.5)])
def test_the_next_tick_is_the_next_multiple_of_the_period(now_s, left_s):
    assert seconds_to_tick(1.0, now_s=now_s) == left_s


@given(st.floats(0.001, 60.0), st.floats(0.0, 1e7))
def test_it_always_comes_and_within_a_period(period_s, now_s):
    assert 0 < seconds_to_tick(period_s, now_s=now_s) <= period_s


@given(st.integers(1, 40), st.floats(0.0, 1e7))
def test_a_period_and_its_parts_share_their_ticks(parts, now_s):
    tick_s = now_s + seconds_to_tick(1.0, now_s=now_s)
    assert seconds_to_tick(1.0 / parts, now_s=tick_s - 1e-4) == pytest.approx(1e-4, abs=1e-6)


async def test_a_task_wakes_after_the_tick_and_not_before():
    before = time.monotonic() // 0.01
    await sleep_until_tick(0.01)
    assert time.monotonic() // 0.01 > before
