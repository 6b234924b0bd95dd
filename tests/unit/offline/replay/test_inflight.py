"""Rollouts in flight: folded in the order of reading, whatever is scored first, and bounded in number and bytes."""

import asyncio

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.offline.replay.inflight import BlockSize, InFlight
from lachesis.pipeline.offline.replay.pace import ReplayPace
from lachesis.pipeline.offline.replay.scoring import ScoreOrReason
from lachesis.pipeline.offline.replay.selected import SelectedRollout


def flight_of(most=32, *, max_rate=None, draining=None, fold=lambda *_: None):
    return InFlight(most, max_rate, draining or anyio.Event(), fold)


def found(n):
    return SelectedRollout("sums", n, f"{n:032x}")


@given(st.integers(1, 12).flatmap(lambda n: st.permutations(range(n))))
def test_they_are_folded_in_the_order_in_which_they_were_begun(order):
    folded = []

    async def main():
        flight = flight_of(fold=lambda one, verdict: folded.append((one.seq, verdict.reason)))
        slots = [await flight.begin(found(n), 1) for n in range(len(order))]
        for n in order:
            flight.settle_rollout(slots[n], ScoreOrReason(None, str(n)))

    asyncio.run(main())
    assert folded == [(n, str(n)) for n in range(len(order))]


@pytest.mark.parametrize(("most", "size", "room"), [(3, 1, 3), (100, 24 << 20, 2), (100, 1 << 30, 1)])
async def test_there_is_room_for_so_many_groups_and_bytes(most, size, room):
    flight = flight_of(most)
    begun = []

    async def begin():
        while len(begun) <= room:
            begun.append(await flight.begin(found(len(begun)), size))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(begin)
        await anyio.wait_all_tasks_blocked()
        assert len(begun) == room
        flight.settle_rollout(begun[0], ScoreOrReason(None))
    assert len(begun) == room + 1


@pytest.mark.parametrize(
    ("pace", "waits", "in_flight", "block"),
    [
        (ReplayPace(), True, 32, 16),
        (ReplayPace(), False, 512, 256),
        (ReplayPace(workers=4), True, 128, 16),
        (ReplayPace(workers=4), False, 2048, 256),
        (ReplayPace(workers=4, max_inflight=32), False, 32, 4),
        (ReplayPace(workers=4, max_inflight=2), True, 2, 1),
        (ReplayPace(workers=4, max_rate=50.0), True, 128, 5),
        (ReplayPace(workers=4, max_rate=0.5), False, 2048, 1),
    ],
)
def test_workers_share_what_may_be_in_flight(pace, waits, in_flight, block):
    assert (pace.in_flight(waits=waits), pace.block(waits=waits)) == (in_flight, block)


async def test_a_block_is_what_a_worker_judges_in_a_fifth_of_a_second():
    blocks = BlockSize(ReplayPace(workers=2), waits=False)
    sizes = []
    for seconds in (0.0, 0.01, 0.2, 0.4, 200.0):
        sizes.append(await blocks.begin())
        blocks.answered(sizes[-1], seconds)
    assert [*sizes, await blocks.begin()] == [16, 64, 256, 256, 128, 1]
    for _ in range(3):
        await blocks.begin()
    with anyio.move_on_after(0.05) as full:  # two for each worker
        await blocks.begin()
    assert full.cancelled_caught


async def test_a_block_whose_raters_are_waited_for_is_what_the_pace_allows():
    blocks = BlockSize(ReplayPace(workers=2), waits=True)
    for _ in range(9):
        assert await blocks.begin() == 16
        blocks.answered(16, 60.0)


async def test_nothing_is_begun_once_it_drains():
    draining = anyio.Event()
    flight = flight_of(max_rate=0.001, draining=draining)
    assert await flight.begin(found(1), 1) is not None
    draining.set()
    assert await flight.begin(found(2), 1) is None


async def test_others_have_their_turn_where_nothing_is_waited_for():
    flight, turn = flight_of(), anyio.Event()

    async def other():
        turn.set()

    async with anyio.create_task_group() as tasks:
        flight.settle_rollout(await flight.begin(found(1), 1), ScoreOrReason(None))
        tasks.start_soon(other)
        while not turn.is_set():
            flight.settle_rollout(await flight.begin(found(2), 1), ScoreOrReason(None))
