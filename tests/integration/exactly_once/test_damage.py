"""A broker whose store is damaged while it is down: no reader takes what cannot be read for what never was."""

import hashlib

import anyio
import msgspec
import pytest
from integration.batcher.test_batcher import RUN, World, batcher, fates, make_config, read_until
from integration.damage import damage_message, drop_blocks, truncate
from stages import run_batcher

from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.errors import DamagedError, HistoryLostError, LedgerError, leaves
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, POINTER, STATE, TrainerState
from lachesis.pipeline.ledger.reader import find_position
from lachesis.pipeline.runtime.commitlog import CommitLog
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.state import StateStore
from lachesis.pipeline.trainer.feed import BatchFeed
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import CurriculumEvent
from lachesis.schemas.control import PolicyRecord, StateSnapshot
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.subjects import BUCKET, EVENTS, LEDGER, LIVE

LINE = subjects.ledger(RUN, "main")


@pytest.fixture
async def server(tmp_path, streams_config, anyio_backend):
    async with EmbeddedServer(tmp_path / "store", ServerConfig(max_file_bytes=4 << 30)) as server:
        async with await connect(server.url, run=RUN, name="tests", token=server.token) as bus:
            await bus.ensure_streams(streams_config)
        yield server


@pytest.fixture
async def bus(server):
    async with await connect(server.url, run=RUN, name="tests", token=server.token) as bus:
        yield bus


@pytest.fixture
def config(tmp_path):
    return msgspec.structs.replace(make_config(), folder=str(tmp_path / "run"))


async def write_batches(bus, config, count):
    """Return the entries of a ledger with so many batches."""
    world = World(bus)
    async with batcher(bus, config):
        for number in range(1, count + 1):
            await world.reward(*[await world.rollout() for _ in range(2)])
            entries = await read_until(bus, batches=number)
    return entries


async def refused(bus, config) -> LedgerError:
    """Return why a batcher does not start, having made sure that it wrote nothing."""
    before = await bus.extent(LEDGER, ">")
    with anyio.fail_after(60), pytest.raises((LedgerError, BaseExceptionGroup)) as caught:
        await run_batcher(Service(bus, "batcher", RUN), config)
    assert await bus.extent(LEDGER, ">") == before
    (error,) = leaves(caught.value)
    assert isinstance(error, LedgerError)
    return error


def save_state(config, position: LedgerPosition, step: int) -> None:
    """Write what a checkpoint of `step` knows of the ledger."""
    name = f"step-{step:08d}"
    path = config.path / CHECKPOINTS / name
    path.mkdir(parents=True)
    state = TrainerState(
        step=step,
        lineage="a",
        policy_version=f"{step}-a-b",
        ledger_position=position.entries,
        chain_hash=position.digest,
    )
    (path / STATE).write_bytes(msgspec.json.encode(state))
    (path.parent / POINTER).write_text(name)


def position_of(entry):
    return LedgerPosition(entry.index + 1, entry.digest())


async def report(bus, entry):
    feed = await BatchFeed.open(bus, RUN, "main", term="t")
    feed.position = position_of(entry)
    step = entry.next_batch
    await feed.report_trained(policy_version=f"{step}-a-b", step=step, lineage="a", checkpoint=f"step-{step}", voids=[])


async def publish_policy(bus, step):
    feed = await BatchFeed.open(bus, RUN, "main", term="t")
    version = str(PolicyVersion(step, "a", "b"))
    record = PolicyRecord(run=RUN, version=version, weights="w", tokenizer_hash="h", written_ns=1)
    await feed.publish_policy(record)


async def test_a_damaged_newest_entry_does_not_begin_a_second_ledger(server, bus, config):
    entries = await write_batches(bus, config, 3)
    await damage_message(server, LEDGER, entries[-1].batch.groups[-1].group.encode())
    error = await refused(bus, config)
    assert isinstance(error, DamagedError)
    for part in (f"counts 3 messages on {LINE}", "Nothing was written", "restore its store from a backup"):
        assert part in str(error)


async def test_a_ledger_that_is_gone_is_not_begun_anew_where_steps_were_published(server, bus, config):
    entries = await write_batches(bus, config, 2)
    await publish_policy(bus, 1)
    await drop_blocks(server, LEDGER)
    assert (await bus.extent(LEDGER, LINE)).messages == 0, "the server counts what it cannot read"
    error = await refused(bus, config)
    assert "has published weights of step 1" in str(error)
    save_state(config, position_of(entries[0]), 1)
    error = await refused(bus, config)
    assert "step-00000001 is of a ledger that is not there" in str(error)
    assert "holds 0 entries, of which 1 were read already" in str(error)
    assert "no checkpoint in" in str(error)


async def test_a_ledger_that_ends_before_the_newest_checkpoint_is_not_added_to(server, bus, config):
    entries = await write_batches(bus, config, 3)
    save_state(config, position_of(entries[0]), 1)
    await truncate(server, LEDGER, entries[-1].batch.groups[-1].group.encode())
    save_state(config, position_of(entries[2]), 3)
    error = await refused(bus, config)
    assert isinstance(error, HistoryLostError)
    assert "to go back to step 1, which this ledger knows, write 'step-00000001' into" in str(error)
    (config.path / CHECKPOINTS / POINTER).write_text("step-00000001")  # the way back
    async with batcher(bus, config):
        again = await read_until(bus, batches=3)
    assert fates(again) == fates(entries)


async def test_a_report_that_names_more_than_the_ledger_holds_stops_the_batcher(server, bus, config):
    entries = await write_batches(bus, config, 2)
    await report(bus, entries[0])
    foreign = entries[1].replace(index=1, previous=entries[0].digest(), outcomes=[], written_ns=5)
    await bus.publish(subjects.state(RUN, "trainer", LIVE, "main"), b"", msg_id="no report")  # is passed over
    assert (await find_position(bus, RUN, "main", position_of(entries[0]))) > 0
    feed = await BatchFeed.open(bus, RUN, "main", term="t")
    feed.position = LedgerPosition(3, foreign.digest())
    await feed.report_trained(policy_version="3-a-b", step=3, lineage="a", checkpoint="step-3", voids=[])
    error = await refused(bus, config)
    assert "the trainer's report of step 3" in str(error)
    assert "holds 2 entries, of which 3 were read already" in str(error)


async def test_a_ledger_that_lost_what_nobody_trained_goes_on(server, bus, config):
    entries = await write_batches(bus, config, 3)
    save_state(config, position_of(entries[0]), 1)
    await publish_policy(bus, 1)
    await truncate(server, LEDGER, entries[-1].batch.groups[-1].group.encode())
    async with batcher(bus, config):
        again = await read_until(bus, batches=3)
    assert fates(again) == fates(entries)
    assert [entry.index for entry in again] == [0, 1, 2]


async def test_an_entry_damaged_on_the_way_to_a_position_is_named(server, bus, config):
    entries = await write_batches(bus, config, 3)
    await damage_message(server, LEDGER, entries[1].batch.groups[-1].group.encode())
    with pytest.raises(DamagedError, match=r"the entry before entry 2, at sequence 2 of LEDGER, is gone"):
        await find_position(bus, RUN, "main", position_of(entries[0]))
    save_state(config, position_of(entries[0]), 1)
    assert "the entry before entry 2, at sequence 2 of LEDGER, is gone" in str(await refused(bus, config))


async def test_a_stage_whose_newest_commit_is_damaged_does_not_begin_anew(server, bus):
    subject, state = subjects.event("curriculum", RUN, LIVE, "words"), subjects.state(RUN, "curriculum", LIVE, "words")

    async def open_log(term):
        return await CommitLog.open(
            bus, CurriculumEvent, lambda event: event.commit, subject=subject, state_subject=state, stage="c", term=term
        )

    log, _ = await open_log("a")
    for delta in (b"first-commit", b"second-commit"):
        commit = log.next_commit({}, delta)
        await log.append(
            CurriculumEvent(
                run=RUN, env="words", revision=LIVE, commit=commit, strategy="s", snapshot_id="s", observed=[]
            )
        )
    await damage_message(server, EVENTS, b"second-commit")
    with pytest.raises(DamagedError, match=r"counts 2 messages on rl\.curriculum"):
        await open_log("b")
    assert (await bus.extent(EVENTS, subject)).messages == 2


async def test_a_stage_whose_snapshot_is_damaged_does_not_begin_anew(server, bus):
    subject = subjects.state(RUN, "curriculum", LIVE, "words")
    store, _ = await StateStore.open(bus, subject, "c", "a")
    state = b"the-whole-state"
    await store.write(
        StateSnapshot(stage="c", index=0, covers=1, cursors={}, state=state, sha256=hashlib.sha256(state).digest())
    )
    await damage_message(server, LEDGER, b"the-whole-state")
    with pytest.raises(DamagedError, match=r"counts 1 messages on rl\.state"):
        await StateStore.open(bus, subject, "c", "b")


async def test_a_damaged_policy_record_is_replaced_by_the_trainers_next_one(server, bus):
    await publish_policy(bus, 1)
    await damage_message(server, BUCKET, b"1-a-b")
    with pytest.raises(DamagedError):
        await bus.value(keys.POLICY)
    await publish_policy(bus, 2)
    entry = await bus.value(keys.POLICY)
    assert b"2-a-b" in entry.value
