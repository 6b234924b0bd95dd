"""Stalls: known while their wait lasts and no longer, the oldest first."""

import pytest

from lachesis.pipeline.bus.stalls import STALLED_AFTER_S, Waits


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_wait_is_a_stall_once_it_is_long_and_until_it_ends():
    clock = Clock()
    waits = Waits(clock)
    assert waits.stall is None
    with waits.waiting("publish a") as wait:
        clock.now += STALLED_AFTER_S - 0.1
        assert waits.stall is None
        clock.now += 0.1
        assert waits.stall.reason == "no answer"
        wait.reason = "LEDGER has no leader"
        clock.now += 9.5
        assert str(waits.stall) == "stalled for 12 s: publish a: LEDGER has no leader"
    assert waits.stall is None


def test_the_oldest_wait_is_told_and_then_the_next():
    clock = Clock()
    waits = Waits(clock)
    with waits.waiting("old"):
        clock.now += 2
        with waits.waiting("young"):
            clock.now += 2
            assert waits.stall.what == "old"
    with waits.waiting("new"):
        assert waits.stall is None


def test_a_wait_that_fails_is_over():
    clock = Clock()
    waits = Waits(clock)
    with pytest.raises(ZeroDivisionError), waits.waiting("it"):
        clock.now /= 0
    clock.now += 60
    assert waits.stall is None
