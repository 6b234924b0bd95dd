"""A state larger than a message: in parts, killed between any two of them, against another writer, and damaged."""

import hashlib

import msgspec
import pytest

from lachesis.pipeline.bus.memory.memory_bus import MAX_MESSAGE_BYTES, MemoryBus
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.registry import load_strategy
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool
from lachesis.pipeline.errors import FencedError, InfrastructureError, LedgerError
from lachesis.pipeline.runtime import state as state_module
from lachesis.pipeline.runtime.state import StateStore
from lachesis.schemas import subjects
from lachesis.schemas.control import StateSnapshot
from lachesis.schemas.errors import DataError
from lachesis.schemas.values import unpack

SUBJECT = subjects.state("r", "curriculum", "live", "sums")


class DiesError(Exception):
    """Raised in the place of the n-th commit."""


class Mortal:
    """A bus on which only so many commits are stored; the next one fails before (or after) it is."""

    def __init__(self, bus, commits, error=DiesError, *, stored=False):
        self._bus, self._left, self._error, self._stored = bus, commits, error, stored

    def __getattr__(self, name):
        return getattr(self._bus, name)

    async def commit(self, *args, **kwargs):
        self._left -= 1
        if self._left >= 0:
            return await self._bus.commit(*args, **kwargs)
        if self._stored:
            await self._bus.commit(*args, **kwargs)
        raise self._error


def snapshot(index, state):
    return StateSnapshot(
        stage="s",
        index=index,
        covers=index + 1,
        cursors={"IN": index},
        state=state,
        sha256=hashlib.sha256(state).digest(),
    )


async def stored(bus):
    _, found = await StateStore.open(bus, SUBJECT, "s", "reader")
    return None if found is None else (found.index, found.state)


def a_state(index, parts=3):
    """A state of so many parts, the last of them short."""
    return bytes([index]) * (state_module.PART_BYTES * (parts - 1) + 1)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(state_module, "PART_BYTES", 100)


async def test_a_state_larger_than_any_message_comes_back_whole():
    state = bytes(range(256)) * (28 << 12)  # 28 MiB
    assert len(state) > MAX_MESSAGE_BYTES
    async with MemoryBus() as bus:
        store, _ = await StateStore.open(bus, SUBJECT, "s", "a")
        await store.write(snapshot(0, state))
        assert await stored(bus) == (0, state)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("after", [False, True], ids=["not stored", "stored"])
@pytest.mark.parametrize("commits", range(6))
async def test_a_writer_that_dies_at_any_commit_leaves_a_whole_state(commits, after):
    """Three parts and a snapshot are four commits; the third state would write over the first one's parts."""
    async with MemoryBus() as bus:
        store, _ = await StateStore.open(bus, SUBJECT, "s", "a")
        for index in range(2):
            await store.write(snapshot(index, a_state(index)))
        store, _ = await StateStore.open(Mortal(bus, commits, stored=after), SUBJECT, "s", "b")
        done = commits >= 4 or (commits == 3 and after)
        try:
            await store.write(snapshot(2, a_state(2)))
        except DiesError:
            assert commits < 4
        assert await stored(bus) == ((2, a_state(2)) if done else (1, a_state(1)))
        await bus.trim(subjects.LEDGER, [subjects.state("r", "curriculum", "*", "*")], before=1 << 40)
        assert await stored(bus) == ((2, a_state(2)) if done else (1, a_state(1)))
        store, _ = await StateStore.open(bus, SUBJECT, "s", "c")
        for index in range(3, 6):
            await store.write(snapshot(index, a_state(index, parts=index - 1)))
            assert await stored(bus) == (index, a_state(index, parts=index - 1))


@pytest.mark.usefixtures("small_parts")
async def test_an_outage_between_parts_is_gone_on_from():
    async with MemoryBus() as bus:
        store, _ = await StateStore.open(Mortal(bus, 2, InfrastructureError), SUBJECT, "s", "a")
        with pytest.raises(InfrastructureError):
            await store.write(snapshot(0, a_state(0)))
        store._bus = bus
        await store.write(snapshot(0, a_state(0)))
        assert await stored(bus) == (0, a_state(0))
        store._bus = Mortal(bus, 2, InfrastructureError)
        with pytest.raises(InfrastructureError):
            await store.write(snapshot(1, a_state(1)))
        store._bus = bus
        await store.write(snapshot(2, a_state(2)))  # another one than was begun
        assert await stored(bus) == (2, a_state(2))


@pytest.mark.usefixtures("small_parts")
async def test_a_writer_that_was_replaced_cannot_touch_what_the_next_one_stored():
    async with MemoryBus() as bus:
        old, _ = await StateStore.open(bus, SUBJECT, "s", "old")
        await old.write(snapshot(0, a_state(0)))
        new, _ = await StateStore.open(bus, SUBJECT, "s", "new")
        await new.write(snapshot(1, a_state(1)))
        before = (await bus.usage(subjects.LEDGER)).last
        with pytest.raises(FencedError):
            await old.write(snapshot(1, a_state(9)))
        assert (await bus.usage(subjects.LEDGER)).last == before
        await bus.trim(subjects.LEDGER, [subjects.state("r", "curriculum", "*", "*")], before=1 << 40)
        assert await stored(bus) == (1, a_state(1))


@pytest.mark.usefixtures("small_parts")
async def test_room_is_bounded_by_two_states():
    async with MemoryBus() as bus:
        store, _ = await StateStore.open(bus, SUBJECT, "s", "a")
        for index in range(40):
            if index % 5 == 4:
                store, _ = await StateStore.open(bus, SUBJECT, "s", f"{index}")
            await store.write(snapshot(index, a_state(index, parts=1 + index % 4)))
            await bus.trim(subjects.LEDGER, [subjects.state("r", "curriculum", "*", "*")], before=1 << 40)
            assert await stored(bus) == (index, a_state(index, parts=1 + index % 4))
            assert (await bus.usage(subjects.LEDGER)).messages <= 2 * 4 + 1


@pytest.mark.usefixtures("small_parts")
async def test_a_part_that_is_gone_or_another_is_told_and_a_neighbours_does_not_matter():
    async with MemoryBus() as bus:
        neighbour, _ = await StateStore.open(bus, f"{SUBJECT}2", "s", "a")
        await neighbour.write(snapshot(0, a_state(7)))
        store, _ = await StateStore.open(bus, SUBJECT, "s", "a")
        await store.write(snapshot(0, a_state(0)))
        await bus.trim(subjects.LEDGER, [f"{SUBJECT}2*"], before=1 << 40)
        assert await stored(bus) == (0, a_state(0))
        last = (await bus.last(subjects.LEDGER, f"{SUBJECT}=1=1")).seq
        await bus.publish(f"{SUBJECT}=1=1", b"foreign", msg_id="x")
        assert await stored(bus) == (0, a_state(0))
        await bus.trim(subjects.LEDGER, [f"{SUBJECT}=1=1"], before=last + 1)
        with pytest.raises(LedgerError, match="a part of the state is gone"):
            await stored(bus)


async def test_a_state_beyond_all_bounds_is_refused(monkeypatch):
    monkeypatch.setattr(state_module, "MAX_STATE_BYTES", 5 << 20)
    async with MemoryBus() as bus:
        store, _ = await StateStore.open(bus, SUBJECT, "s", "a")
        with pytest.raises(DataError, match="may be stored"):
            await store.write(snapshot(0, b"x" * (6 << 20)))
        assert await stored(bus) is None


@pytest.mark.slow
async def test_the_curriculum_of_a_million_items_is_kept_and_comes_back():
    items = 1_000_000
    strategy = load_strategy(ItemPool(items), CurriculumConfig())
    for n in range(200):
        strategy.observe(
            ItemFeedback(id=f"{n}", env="e", item=n * 4999, skill=None, n=8, success=(n % 9) / 8, policy_step=n)
        )
    state = msgspec.msgpack.encode(strategy.state_dict())
    assert len(state) > 3 * MAX_MESSAGE_BYTES
    async with MemoryBus() as bus:
        store, _ = await StateStore.open(bus, SUBJECT, "s", "a")
        await store.write(snapshot(0, state))
        _, found = await stored(bus)
    again = load_strategy(ItemPool(items), CurriculumConfig())
    again.load_state_dict(unpack("curriculum state", found))
    assert again.snapshot().id == strategy.snapshot().id
