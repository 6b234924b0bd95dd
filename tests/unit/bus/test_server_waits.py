"""Stalls: known while their wait lasts and no longer, the oldest first."""

import anyio
import pytest

from lachesis.pipeline.bus.server_waits import RETRY_GAP_S, STALLED_AFTER_S, ServerWaits
from lachesis.pipeline.errors import InfrastructureError


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_wait_is_a_stall_once_it_is_long_and_until_it_ends():
    clock = Clock()
    waits = ServerWaits(clock)
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
    waits = ServerWaits(clock)
    with waits.waiting("old"):
        clock.now += 2
        with waits.waiting("young"):
            clock.now += 2
            assert waits.stall.what == "old"
    with waits.waiting("new"):
        assert waits.stall is None


def test_a_wait_that_fails_is_over():
    clock = Clock()
    waits = ServerWaits(clock)
    with pytest.raises(ZeroDivisionError), waits.waiting("it"):
        clock.now /= 0
    clock.now += 60
    assert waits.stall is None


def give_up(clock, waits, seconds):
    def attempt():
        with waits.waiting("reader of LEDGER") as wait:
            clock.now += seconds
            wait.reason = "no leader"
            raise InfrastructureError

    with pytest.raises(InfrastructureError):
        attempt()


def test_attempts_at_the_same_thing_are_one_wait():
    clock = Clock()
    waits = ServerWaits(clock)
    give_up(clock, waits, 2)
    clock.now += RETRY_GAP_S / 2
    assert waits.stall.seconds == 2 + RETRY_GAP_S / 2  # known between two attempts too
    give_up(clock, waits, 2)
    assert str(waits.stall) == f"stalled for {4 + RETRY_GAP_S / 2:.0f} s: reader of LEDGER: no leader"
    with waits.waiting("reader of LEDGER"):
        assert waits.stall is not None
    assert waits.stall is None


def test_an_attempt_that_is_not_repeated_is_over():
    clock = Clock()
    waits = ServerWaits(clock)
    give_up(clock, waits, 10)
    clock.now += RETRY_GAP_S + 0.1
    assert waits.stall is None
    with waits.waiting("reader of LEDGER") as wait:
        assert waits.seconds(wait) == 0


async def test_a_wait_that_was_cancelled_is_over():
    clock = Clock()
    waits = ServerWaits(clock)
    with anyio.CancelScope() as scope:
        with waits.waiting("it"):
            clock.now += 10
            scope.cancel()
            await anyio.sleep(1)
    assert waits.stall is None
