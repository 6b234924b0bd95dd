"""The commit log against a model: a stage that sums what it reads, killed at every line it awaits."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.pipeline.bus.commit_ids import commit_id
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.errors import FencedError, LedgerError
from lachesis.pipeline.retention.holds import update_record
from lachesis.pipeline.runtime import state
from lachesis.pipeline.runtime.commitlog import (
    MAX_BYTES_SINCE_SNAPSHOT,
    MAX_COMMITS_SINCE_SNAPSHOT,
    SNAPSHOT_EVERY,
    CommitLog,
    is_snapshot_due,
)
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit, CurriculumEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.retention import LostRange

SUBJECT = subjects.event("curriculum", "r", "live", "sums")
STATE = subjects.state("r", "curriculum", "live", "sums")


async def opened(bus, term):
    return await CommitLog.open(
        bus, CurriculumEvent, lambda event: event.commit, subject=SUBJECT, state_subject=STATE, stage="s", term=term
    )


def event(commit: Commit):
    return CurriculumEvent(
        run="r", env="sums", revision="live", strategy="s", snapshot_id="i", commit=commit, observed=[]
    )


class Summing:
    """A stage whose state is the list of the numbers it has read."""

    def __init__(self, log, restored):
        self.log = log
        self.seen = msgspec.msgpack.decode(restored.state) if restored.state is not None else []
        for delta in restored.deltas:
            self.seen += msgspec.msgpack.decode(delta)
        self.cursor = restored.cursors.get("IN", 1)

    @classmethod
    async def open(cls, bus, term):
        return cls(*await opened(bus, term))

    async def take(self, numbers):
        """Read some numbers from the cursor on and commit."""
        delta = list(range(self.cursor, self.cursor + numbers))
        commit = self.log.next_commit({"IN": self.cursor + numbers}, msgspec.msgpack.encode(delta))
        await self.log.append(event(commit))
        self.cursor += numbers
        self.seen += delta

    async def snapshot(self):
        await self.log.snapshot({"IN": self.cursor}, msgspec.msgpack.encode(self.seen))


async def commits(bus):
    async with bus.read(subjects.EVENTS, [SUBJECT], follow=False) as messages:
        return [decode(CurriculumEvent, message.data).commit async for message in messages]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 3)),
        st.just(("snapshot", 0)),
        st.just(("crash", 0)),  # between any two of the others: after an append, before its snapshot, ...
        st.just(("trim", 0)),
    ),
    max_size=30,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(plan=steps)
async def test_a_restart_at_any_point_finds_exactly_what_was_committed(plan):
    async with MemoryBus() as bus:
        stage = await Summing.open(bus, "0")
        total, count, covered = 0, 0, None
        for number, (what, amount) in enumerate(plan):
            if what == "take":
                await stage.take(amount)
                total, count = total + amount, count + 1
            elif what == "snapshot" and count:
                await stage.snapshot()
                covered = await bus.last(subjects.EVENTS, SUBJECT)
            elif what == "trim" and covered:  # as the governor may: what the last snapshot covers goes
                await bus.trim(subjects.EVENTS, [SUBJECT], before=covered.seq + 1)
            elif what == "crash":
                stage = await Summing.open(bus, str(number + 1))
            assert stage.seen == list(range(1, total + 1))
            assert stage.cursor == total + 1
        again = await Summing.open(bus, "last")
        assert (again.seen, again.cursor) == (stage.seen, stage.cursor)
        assert again.log.index == count
        indexes = [commit.index for commit in await commits(bus)]
        assert indexes == list(range(count - len(indexes), count))


async def test_of_two_writers_the_older_is_fenced_and_stores_nothing_more():
    async with MemoryBus() as bus:
        old = await Summing.open(bus, "old")
        await old.take(2)
        new = await Summing.open(bus, "new")
        await new.take(3)
        for _ in range(3):
            with pytest.raises(FencedError):
                await old.take(1)
        assert [commit.term for commit in await commits(bus)] == ["old", "new"]
        await new.take(1)
        assert (await Summing.open(bus, "third")).seen == [1, 2, 3, 4, 5, 6]


async def test_a_late_snapshot_of_a_fenced_writer_never_hides_a_commit():
    async with MemoryBus() as bus:
        old = await Summing.open(bus, "old")
        await old.take(2)
        new = await Summing.open(bus, "new")
        await new.take(3)
        await old.snapshot()  # of its own last commit, which is on record: true, if late
        assert (await Summing.open(bus, "third")).seen == [1, 2, 3, 4, 5]
        with pytest.raises(FencedError):
            await new.snapshot()


async def test_an_append_whose_answer_was_lost_is_not_taken_for_another_writers():
    async with MemoryBus() as bus:
        stage = await Summing.open(bus, "a")
        commit = stage.log.next_commit({"IN": 2}, msgspec.msgpack.encode([1]))
        msg_id = commit_id(f"commit.{SUBJECT}.a.0")
        await bus.commit(SUBJECT, encode(event(commit)), expected=0, msg_id=msg_id)  # stored, unheard
        await stage.log.append(event(commit))
        assert len(await commits(bus)) == 1
        assert stage.log.index == 1


async def test_a_gap_in_the_commits_is_refused():
    async with MemoryBus() as bus:
        stage = await Summing.open(bus, "a")
        for _ in range(3):
            await stage.take(1)
        await bus.trim(subjects.EVENTS, [SUBJECT], before=2)  # no snapshot covers what goes
        with pytest.raises(LedgerError, match="commits are gone"):
            await Summing.open(bus, "b")


async def lose_snapshot(bus):
    """Store five commits, of which a snapshot that is lost since covered three, which are trimmed."""
    stage = await Summing.open(bus, "a")
    await stage.take(1)
    await stage.snapshot()
    kept = await bus.last(subjects.LEDGER, STATE)
    for _ in range(4):
        await stage.take(1)
    await bus.trim(subjects.EVENTS, [SUBJECT], before=4)
    return kept


async def note_lost(bus, first, last):
    lost = {subjects.LEDGER: [LostRange(first, last)]}
    await update_record(bus, "r", lambda old: old.replace(lost=lost))


async def test_a_gap_that_lost_snapshots_left_is_accepted_once_a_recovery_noted_their_loss():
    async with MemoryBus() as bus:
        kept = await lose_snapshot(bus)
        await note_lost(bus, 1, kept.seq)  # an earlier loss says nothing of this one
        with pytest.raises(LedgerError, match=r"commits are gone.*lachesis runs recover r"):
            await opened(bus, "b")
        await note_lost(bus, kept.seq + 1, kept.seq + 3)
        log, restored = await opened(bus, "c")
        assert restored.has_gap
        assert [msgspec.msgpack.decode(delta) for delta in restored.deltas] == [[4], [5]]
        assert (log.index, restored.cursors) == (5, {"IN": 6})
        assert await bus.publish(subjects.state("r", "filler", "live", "0"), b"", msg_id="filler")
        await note_lost(bus, kept.seq + 1, kept.seq + 1)
        stage = Summing(log, restored)
        await stage.snapshot()
        await stage.take(1)
        _, after = await opened(bus, "d")
        assert not after.has_gap
        assert msgspec.msgpack.decode(after.state) == [1, 4, 5]


async def test_a_snapshot_ahead_of_the_stream_is_refused():
    async with MemoryBus() as whole, MemoryBus() as rolled_back:
        stage = await Summing.open(whole, "a")
        await stage.take(1)
        await stage.take(1)
        await stage.snapshot()
        snapshot = await whole.last(subjects.LEDGER, STATE)
        first = await whole.get(subjects.EVENTS, 1)
        await rolled_back.commit(SUBJECT, first.data, expected=0, msg_id="1")
        await rolled_back.commit(STATE, snapshot.data, expected=0, msg_id="2")
        with pytest.raises(LedgerError, match="lost history"):
            await Summing.open(rolled_back, "b")


async def test_a_state_too_large_to_be_stored_is_rebuilt_from_the_commits_alone(monkeypatch):
    monkeypatch.setattr(state, "MAX_STATE_BYTES", 8 << 20)
    async with MemoryBus() as bus:
        stage = await Summing.open(bus, "a")
        await stage.take(2)
        await stage.log.snapshot({"IN": stage.cursor}, bytes(9 << 20))
        assert stage.log.since_snapshot == 0  # tried again after as many commits as ever
        await stage.take(1)
        assert (await Summing.open(bus, "b")).seen == [1, 2, 3]


@pytest.mark.parametrize(("commits", "weight", "state", "due"), [
    (SNAPSHOT_EVERY, 0, 0, True), (SNAPSHOT_EVERY - 1, 1 << 30, 0, False),
    (SNAPSHOT_EVERY, 7_000_000, 28_000_000, True), (SNAPSHOT_EVERY, 6_999_999, 28_000_000, False),
    (MAX_COMMITS_SINCE_SNAPSHOT - 1, 6_999_999, 28_000_000, False), (MAX_COMMITS_SINCE_SNAPSHOT, 0, 28_000_000, True),
    (SNAPSHOT_EVERY, MAX_BYTES_SINCE_SNAPSHOT, 1 << 30, True),
    (SNAPSHOT_EVERY, MAX_BYTES_SINCE_SNAPSHOT - 1, 1 << 30, False),
])  # fmt: skip
def test_a_snapshot_is_due_once_commits_weigh_a_quarter_of_the_state(commits, weight, state, due):
    assert is_snapshot_due(commits, weight, state) == due


@given(size=st.integers(1, 1 << 20), state=st.integers(0, 1 << 31))
def test_what_snapshots_store_and_a_start_reads_is_bounded(size, state):
    commits = next(n for n in range(MAX_COMMITS_SINCE_SNAPSHOT + 1) if is_snapshot_due(n, n * size, state))
    assert commits == SNAPSHOT_EVERY or (commits - 1) * size < min(state / 4, MAX_BYTES_SINCE_SNAPSHOT)
    if commits < MAX_COMMITS_SINCE_SNAPSHOT and state <= 4 * MAX_BYTES_SINCE_SNAPSHOT:
        assert state < 4 * (commits * size + 1)


async def test_a_large_state_is_stored_no_more_often_than_its_commits_weigh_and_a_start_goes_on_counting():
    async with MemoryBus() as bus:
        stage = await Summing.open(bus, "a")
        await stage.take(1)
        weight = len((await bus.last(subjects.EVENTS, SUBJECT)).data)
        large = msgspec.msgpack.encode([1] + [0] * (4 * weight * SNAPSHOT_EVERY * 5 // 2))  # zeros of a byte each
        await stage.log.snapshot({"IN": 2}, large)
        for _ in range(2 * SNAPSHOT_EVERY):
            await stage.take(1)
        assert not stage.log.snapshot_due
        again = (await Summing.open(bus, "b")).log
        assert again.since_snapshot == 2 * SNAPSHOT_EVERY
        while not again.snapshot_due:
            await again.append(event(again.next_commit({"IN": 1}, b"")))
        assert 2 * SNAPSHOT_EVERY < again.since_snapshot < 3 * SNAPSHOT_EVERY
