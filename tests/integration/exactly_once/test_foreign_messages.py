"""Messages of somebody else on a subject that one writer owns: passed over, reported, and no hindrance to any start."""

import logging

import anyio
import pytest
from integration.batcher.test_batcher import RUN, World, batcher, fates, make_config, read_until
from stages import run_batcher

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.errors import FencedError
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import find_position, follow_ledger
from lachesis.pipeline.runtime.commitlog import CommitLog
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.feed import BatchFeed
from lachesis.schemas import subjects
from lachesis.schemas.annotations import CurriculumEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.control import StateSnapshot
from lachesis.schemas.errors import VersionError

REWARDS = subjects.event("curriculum", "r", "live", "sums")
STATE = subjects.state("r", "curriculum", "live", "sums")
LEDGER = subjects.ledger(RUN, "main")


async def open_log(bus: Bus, term: str) -> tuple[CommitLog[CurriculumEvent], list[bytes], bytes | None]:
    log, restored = await CommitLog.open(
        bus,
        CurriculumEvent,
        lambda event: event.commit,
        subject=REWARDS,
        state_subject=STATE,
        stage="curriculum",
        term=term,
    )
    return log, restored.deltas, restored.state


async def commit(log: CommitLog[CurriculumEvent], delta: bytes) -> None:
    event = CurriculumEvent(
        run="r",
        env="sums",
        revision="live",
        strategy="s",
        snapshot_id="i",
        commit=log.next_commit({}, delta),
        observed=[],
    )
    await log.append(event)


async def test_garbage_and_old_commits_between_commits_are_passed_over(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    log, _, _ = await open_log(bus, "a")
    await commit(log, b"1")
    await commit(log, b"2")
    old = await bus.last(subjects.EVENTS, REWARDS)
    assert old
    await bus.publish(REWARDS, b"\xc1 nonsense", msg_id="foreign")
    again = await bus.publish(REWARDS, old.data, msg_id="a commit under another name")
    with pytest.raises(FencedError, match=f"last sequence is {again.seq}"):
        await commit(log, b"3")  # alive, it cannot tell what this is; a start can
    for term, before in (("b", [b"1", b"2"]), ("c", [b"1", b"2", b"3"])):
        log, deltas, _ = await open_log(bus, term)
        assert deltas == before
        await commit(log, b"3")
    assert f"sequence {again.seq} of EVENTS was not written by its only writer" in caplog.text


async def test_a_foreign_snapshot_hides_neither_the_last_one_nor_any_commit(bus: Bus) -> None:
    log, _, _ = await open_log(bus, "a")
    await commit(log, b"1")
    await log.snapshot({}, b"state of 1")
    await commit(log, b"2")
    await bus.publish(STATE, b"nonsense", msg_id="foreign")
    other = StateSnapshot(
        stage="normalizer", index=9, covers=1, cursors={}, state=b"no state of this stage", sha256=bytes(32)
    )
    await bus.publish(STATE, encode(other), msg_id="foreign too")
    log, deltas, state = await open_log(bus, "b")
    assert (state, deltas) == (b"state of 1", [b"2"])
    await log.snapshot({}, b"state of 2")
    assert (await open_log(bus, "c"))[1:] == ([], b"state of 2")


async def test_what_a_newer_build_committed_is_not_foreign(bus: Bus) -> None:
    log, _, _ = await open_log(bus, "a")
    await commit(log, b"1")
    event = CurriculumEvent(
        v=99,
        run="r",
        env="sums",
        revision="live",
        strategy="s",
        snapshot_id="i",
        commit=log.next_commit({}, b"2"),
        observed=[],
    )
    await bus.publish(REWARDS, encode(event), msg_id="newer")
    with pytest.raises(VersionError):
        await open_log(bus, "b")


async def test_the_ledger_goes_on_past_foreign_messages_and_so_do_its_readers(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(bus)
    async with batcher(bus, make_config()):
        await world.reward(*[await world.rollout() for _ in range(2)])
        first = (await read_until(bus, batches=1))[-1]
        await world.reward(*[await world.rollout() for _ in range(2)])
        await read_until(bus, batches=2)
    copied = await bus.get(subjects.LEDGER, 1)
    for n, data in enumerate((b"nonsense", copied.data)):
        await bus.publish(LEDGER, data, msg_id=f"foreign {n}", headers=dict(copied.headers) if n else None)
        async with batcher(bus, make_config()):
            await world.reward(*[await world.rollout() for _ in range(2)])
            entries = await read_until(bus, batches=3 + n)
        assert len(fates(entries)) == 6 + 2 * n
    everything = [entry async for entry in follow_ledger(bus, RUN, "main", LedgerPosition(), follow=False)]
    assert [entry.index for entry in everything] == list(range(len(everything)))
    assert await find_position(bus, RUN, "main", LedgerPosition(1, first.digest())) == 1
    told = [one for one in caplog.records if "rl.ledger.r.main: the message at sequence" in one.getMessage()]
    assert {one.levelno for one in told} == {logging.WARNING}


async def test_a_live_batcher_that_meets_a_foreign_message_ends_as_fenced_and_its_next_life_goes_on(bus: Bus) -> None:
    world = World(bus)
    with pytest.RaisesGroup(FencedError, flatten_subgroups=True), anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_batcher, Service(bus, "batcher", RUN), make_config())
            await world.reward(*[await world.rollout() for _ in range(2)])
            await read_until(bus, batches=1)
            await bus.publish(LEDGER, b"nonsense", msg_id="foreign")
            await world.reward(*[await world.rollout() for _ in range(2)])
    async with batcher(bus, make_config()):
        assert len(fates(await read_until(bus, batches=2))) == 4


async def test_a_foreign_report_does_not_keep_a_trainer_from_its_start(bus: Bus) -> None:
    subject = subjects.state(RUN, "trainer", subjects.LIVE, "main")
    feed = await BatchFeed.open(bus, RUN, "main", term="a")
    report = {"lineage": "a", "checkpoint": "c", "voids": []}
    await feed.report_trained(policy_version="1-a-b", step=1, **report)
    await bus.publish(subject, b"nonsense", msg_id="foreign")
    feed = await BatchFeed.open(bus, RUN, "main", term="b")
    assert feed.report is not None
    assert feed.report.step == 1
    await feed.report_trained(policy_version="2-a-b", step=2, **report)
