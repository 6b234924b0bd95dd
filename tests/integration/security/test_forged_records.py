"""Records forged with a service's own key end no start for good: each is named, and one command passes it over."""

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from integration.batcher.test_batcher import World
from integration.harness import SUMS
from unit.ledger.test_audit import make_entries

from lachesis.pipeline.bus.config import ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.environment.held_out import keep_record, read_held_out
from lachesis.pipeline.errors import HistoryLostError, LedgerError
from lachesis.pipeline.extensions.atropos.gateway.keys import stored_key
from lachesis.pipeline.extensions.atropos.gateway.store import GatewayStore
from lachesis.pipeline.governor.stage import check_term
from lachesis.pipeline.ledger.chain import PREVIOUS_HEADER, LedgerPosition
from lachesis.pipeline.ledger.ledger_end import read_ledger_end
from lachesis.pipeline.ledger.reader import follow_ledger, newest_entry
from lachesis.pipeline.ledger.rollbacks import refuse_rolled_back
from lachesis.pipeline.retention.recovery import apply_plan
from lachesis.pipeline.retention.recovery_plan import make_plan
from lachesis.pipeline.retention.recovery_record import RecoveryPlan
from lachesis.pipeline.runtime import stream_marks
from lachesis.pipeline.runtime.retention_record import read_record
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.store_marks import MarkWriter
from lachesis.pipeline.trainer.feed import BatchFeed
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import StreamMark
from lachesis.schemas.codec import SCHEMA_VERSION, encode
from lachesis.schemas.control import HeldOutRecord
from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import LedgerEntry, Outcome
from lachesis.schemas.store_marks import StoreMarks
from lachesis.schemas.subjects import LEDGER, ROLLOUTS
from lachesis.services.cli.recover import describe_plan
from lachesis.services.run.unusable_states import find_unusable
from lachesis.services.stage_settings import ledger_settings, recovery_settings

RUN = "one"
NEWER = msgspec.msgpack.encode({"v": SCHEMA_VERSION + 1})
GARBAGE = b"\xc1\xff"
ENTRIES = 6


@pytest.fixture
async def bus(tmp_path: Path, streams_config: StreamsConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NatsBus]:
    monkeypatch.setattr(stream_marks, "BELIEVE_LOSS_S", 0.2)
    async with (
        EmbeddedServer(tmp_path / "store", ServerConfig(max_file_bytes=4 << 30)) as server,
        await connect(server.url, run=RUN, name="tests", token=server.token) as made,
    ):
        await made.ensure_streams(streams_config)
        yield made


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "run").mkdir()
    environments = {"sums": EnvironmentConfig(kind=f"{SUMS}:Sums", samples=2)}
    return RunConfig(run=RUN, folder=str(tmp_path / "run"), environments=environments)


async def write_ledger(bus: NatsBus) -> None:
    """Store twelve rollouts, and a ledger of six entries that tells of them."""
    world = World(bus, RUN)
    ids = {seq: group.id for seq, group in [await world.rollout() for _ in range(2 * ENTRIES)]}
    for entry in make_entries(ENTRIES, run=RUN, ids=ids):
        await append(bus, entry)


async def append(bus: NatsBus, entry: LedgerEntry, previous: int | None = None) -> None:
    last = await bus.last(LEDGER, subjects.ledger(RUN, "main"))
    at = str((last.seq if last else 0) if previous is None else previous)
    headers, msg_id = {PREVIOUS_HEADER: at}, secrets.token_hex(8)
    await bus.publish(subjects.ledger(RUN, "main"), encode(entry), msg_id=msg_id, headers=headers)


async def following(bus: NatsBus, **changes: Any) -> LedgerEntry:
    """Return an entry that follows the newest one in the chain, and tells of nothing but `changes`."""
    newest, _, _ = await newest_entry(bus, RUN, "main")
    assert newest is not None
    quiet = newest.replace(index=newest.index + 1, previous=newest.digest(), batch=None, outcomes=[], written_ns=2)
    return quiet.replace(**changes)


async def recover(bus: NatsBus, config: RunConfig) -> RecoveryPlan:
    plan = await make_plan(bus, recovery_settings(config), "forged", await find_unusable(bus, config))
    assert plan is not None
    await apply_plan(bus, recovery_settings(config), plan)
    await refuse_rolled_back(bus, ledger_settings(config))
    assert await make_plan(bus, recovery_settings(config), "again", await find_unusable(bus, config)) is None
    return plan


async def jump(bus: NatsBus) -> None:
    await append(bus, await following(bus, index=10**6))


async def other_history(bus: NatsBus) -> None:
    await append(bus, await following(bus, previous="f" * 64))


async def far_watermark(bus: NatsBus) -> None:
    await append(bus, await following(bus, watermark=10**12))


async def far_outcome(bus: NatsBus) -> None:
    await append(bus, await following(bus, outcomes=[Outcome(10**12, "g", "dead", 1)]))


async def far_events(bus: NatsBus) -> None:
    await append(bus, await following(bus, events_cursor=10**12))


async def many_settled(bus: NatsBus) -> None:
    await append(bus, await following(bus, resolved=b"\xff" * 200_000))


async def second_outcome(bus: NatsBus) -> None:
    newest, _, _ = await newest_entry(bus, RUN, "main")
    assert newest is not None
    await append(bus, await following(bus, outcomes=[Outcome(newest.watermark, "g", "dead", 1)]))


async def other_count(bus: NatsBus) -> None:
    await append(bus, await following(bus, next_batch=1 << 60))


async def other_totals(bus: NatsBus) -> None:
    await append(bus, await following(bus, totals={"batched": (1 << 63) - 1}))


async def newer_entry(bus: NatsBus) -> None:
    await bus.publish(subjects.ledger(RUN, "main"), NEWER, msg_id="forged")


async def names_itself(bus: NatsBus) -> None:
    """A reader that walks back along such headers never comes to an end."""
    last = await bus.last(LEDGER, subjects.ledger(RUN, "main"))
    assert last is not None
    await append(bus, await following(bus), previous=last.seq + 1)


FORGERIES = [
    jump, other_history, far_watermark, far_outcome, far_events, many_settled, second_outcome, other_count,
    other_totals, newer_entry, names_itself,
]  # fmt: skip


@pytest.mark.parametrize("forge", FORGERIES)
async def test_a_forged_entry_is_refused_by_name_and_passed_over_by_all_once_it_is_noted(
    bus: NatsBus, config: RunConfig, forge: Callable[[NatsBus], Awaitable[None]]
) -> None:
    await write_ledger(bus)
    before = await read_ledger_end(bus, ledger_settings(config), patience_s=0)
    await forge(bus)
    at = (await bus.usage(LEDGER)).last
    with pytest.raises((LedgerError, DataError)) as refused:
        await read_ledger_end(bus, ledger_settings(config), patience_s=0)
    assert not isinstance(refused.value, HistoryLostError)
    assert "lachesis runs recover" in str(refused.value)
    plan = await recover(bus, config)
    assert plan.left_out == {LEDGER: [at]}
    assert (plan.losses, plan.checkpoint, plan.copies) == ([], None, [])
    assert f"the batcher cannot use its own messages {at} to {at} of LEDGER" in "\n".join(
        describe_plan(plan, begun=False)
    )
    after = await read_ledger_end(bus, ledger_settings(config), patience_s=0)
    assert (after.entry, after.entry_seq) == (before.entry, before.entry_seq)
    await append(bus, await following(bus), previous=after.entry_seq)
    read = [entry.index async for entry in follow_ledger(bus, RUN, "main", LedgerPosition(), follow=False)]
    assert read == list(range(ENTRIES + 1))


async def batch_again(bus: NatsBus) -> None:
    """A batch of rollouts that are in a batch already, with the right number and place in the chain."""
    entries = [entry async for entry in follow_ledger(bus, RUN, "main", LedgerPosition(), follow=False)]
    first, newest = next(entry.batch for entry in entries if entry.batch is not None), entries[-1]
    again = msgspec.structs.replace(first, number=newest.next_batch)
    await append(bus, await following(bus, batch=again, next_batch=newest.next_batch + 1))


@pytest.mark.parametrize("more", [0, 2])
async def test_the_trainer_refuses_a_forged_batch_before_it_trains_on_it(
    bus: NatsBus, config: RunConfig, more: int
) -> None:
    await write_ledger(bus)
    newest, first, _ = await newest_entry(bus, RUN, "main")
    assert newest is not None
    await batch_again(bus)
    for _ in range(more):  # these follow the forged entry as they should
        await append(bus, await following(bus))
    at = LedgerPosition(newest.index + 1, newest.digest())
    feed = BatchFeed(bus, RUN, "main", term="t")
    feed.position = at
    with pytest.raises(LedgerError, match=f"entry {newest.index + 1} of the ledger.*second outcome.*runs recover"):
        await anext(feed.batches())
    plan = await recover(bus, config)
    assert plan.left_out == {LEDGER: list(range(first + 1, first + 2 + more))}
    assert [entry async for entry in follow_ledger(bus, RUN, "main", at, follow=False)] == []


@pytest.mark.parametrize("beyond", [5, pytest.param(stream_marks.MAX_LOST - 1, marks=pytest.mark.slow)])
async def test_an_entry_that_settles_rollouts_behind_the_end_is_recovered_from(
    bus: NatsBus, config: RunConfig, beyond: int
) -> None:
    """What may have been lost is taken for lost, whatever service says so: filling up costs seconds, and no rollout."""
    await write_ledger(bus)
    end = (await bus.usage(ROLLOUTS)).last
    await append(bus, await following(bus, watermark=end + beyond, written_ns=time.time_ns()))
    with pytest.raises(HistoryLostError, match="lachesis runs recover"):
        await refuse_rolled_back(bus, ledger_settings(config))
    plan = await recover(bus, config)
    assert [(loss.stream, loss.last) for loss in plan.losses] == [(ROLLOUTS, end + beyond)]
    usage = await bus.usage(ROLLOUTS)
    assert (usage.last, usage.messages) == (end + beyond, end + 1), "one filler stays"


async def test_garbage_that_names_garbage_as_the_entry_before_hides_no_ledger(bus: NatsBus, config: RunConfig) -> None:
    await write_ledger(bus)
    subject, before = subjects.ledger(RUN, "main"), await read_ledger_end(bus, ledger_settings(config), patience_s=0)
    for number in range(2):
        at = str((await bus.usage(LEDGER)).last)
        await bus.publish(subject, GARBAGE, msg_id=f"garbage.{number}", headers={PREVIOUS_HEADER: at})
    after = await read_ledger_end(bus, ledger_settings(config), patience_s=0)
    assert (after.entry, after.entry_seq) == (before.entry, before.entry_seq)


async def read_term(bus: NatsBus) -> None:
    await check_term(bus, RUN, "live")


async def open_feed(bus: NatsBus) -> None:
    await BatchFeed.open(bus, RUN, "main", term="t")


@pytest.mark.parametrize(
    ("subject", "read", "who"),
    [
        (subjects.state(RUN, "governor", "live", "0"), read_term, "the governor"),
        (subjects.state(RUN, "trainer", "live", "main"), open_feed, "the trainer"),
    ],
)
async def test_a_newer_term_or_report_is_passed_over_once_it_is_noted(
    bus: NatsBus, config: RunConfig, subject: str, read: Callable[[NatsBus], Awaitable[None]], who: str
) -> None:
    await bus.publish(subject, NEWER, msg_id="forged")
    with pytest.raises(DataError, match="lachesis runs recover"):
        await read(bus)
    plan = await recover(bus, config)
    assert plan.left_out == {LEDGER: [1]}
    assert f"{who} cannot use its own messages" in plan.problems[0]
    await read(bus)


@pytest.mark.parametrize("place", ["LEDGER", "key"])
@pytest.mark.parametrize(
    ("count", "ends"), [(3, {ROLLOUTS: StreamMark(10**12, 1)}), ((1 << 63) - 1, {"KEYS": StreamMark(1, 1)})]
)
async def test_marks_of_what_no_stream_ever_held_are_written_anew_and_nothing_is_filled_up(
    bus: NatsBus, config: RunConfig, place: str, count: int, ends: dict[str, StreamMark]
) -> None:
    marks = encode(StoreMarks(run=RUN, count=count, written_ns=1, ends=ends))
    if place == "key":
        await bus.put(keys.MARKS, marks)
    else:
        await bus.publish(subjects.marks(RUN), marks, msg_id="forged")
    if place == "LEDGER" or ROLLOUTS in ends:
        await recover(bus, config)
    assert (await bus.usage(ROLLOUTS)).last == 0
    writer = await MarkWriter.open(bus, RUN, config.path)
    await writer.write(None, now=True)
    await writer.write(None, now=True)
    await refuse_rolled_back(bus, ledger_settings(config))


@pytest.mark.parametrize("value", [NEWER, GARBAGE, b"", b"{}", msgspec.msgpack.encode({"v": "x"})])
async def test_keys_that_their_services_cannot_use_are_put_aside(bus: NatsBus, config: RunConfig, value: bytes) -> None:
    service = Service(bus, "environment", RUN)
    held = HeldOutRecord(seed=5, limit=1 << 60)
    keep_record(config.path, "sums", held)
    named = [keys.held_out("sums"), keys.epoch("sums"), keys.webhook("live"), keys.RETENTION]
    named += [stored_key("registry")] if value in {GARBAGE, b""} else []  # it has no version
    for key in named:
        await bus.put(key, value)
    with pytest.raises(DataError, match="lachesis runs recover"):
        await read_held_out(service, "sums")
    if stored_key("registry") in named:
        with pytest.raises(DataError, match="lachesis runs recover"):
            await GatewayStore.open(bus, [])
    plan = await recover(bus, config)
    assert plan.keys == dict.fromkeys(named, value)
    assert await read_held_out(service, "sums") is None
    assert (await read_record(bus, RUN)).run == RUN
    await GatewayStore.open(bus, [])
