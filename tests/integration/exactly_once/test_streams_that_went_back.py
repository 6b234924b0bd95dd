"""One stream's part of the store is older than the rest, or damaged: it is named, and one command leads back."""

import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from integration.servers import RUN

from lachesis.pipeline.bus import streams
from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import CheckpointError, HistoryLostError, LedgerError, StartupError
from lachesis.pipeline.extensions.atropos.gateway.keys import stored_key
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, TrainerState, latest_checkpoint
from lachesis.pipeline.ledger.checkpoint_sums import verify_sums
from lachesis.pipeline.ledger.rollbacks import RECOVERY_FILE, find_contradictions, refuse_rolled_back
from lachesis.pipeline.retention import recovery
from lachesis.pipeline.retention.holds import read_record, update_record
from lachesis.pipeline.retention.recovery import apply_plan, read_unfinished
from lachesis.pipeline.retention.recovery_plan import UnusableState, make_plan
from lachesis.pipeline.retention.recovery_record import RecoveryPlan
from lachesis.pipeline.runtime.commitlog import CommitLog
from lachesis.pipeline.runtime.retention_record import RETENTION_FILE
from lachesis.pipeline.runtime.store_marks import MARKS_FILE, MarkWriter
from lachesis.pipeline.trainer.checkpoint_folder import write_checkpoint
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import CurriculumEvent, StreamMark
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import GENESIS, LedgerEntry, TrainReport
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.retention import LostRange, Retention
from lachesis.schemas.subjects import BUCKET, CALLS, EVENTS, LEDGER, ROLLOUTS, STREAMS, TEACHER
from lachesis.services.preflight.ledger import check_fit
from lachesis.services.run.unusable_keys import find_unusable_keys
from lachesis.services.stage_settings import ledger_settings, recovery_settings

from .conftest import SUMS

EVERY_STORE = tuple(store for store in (*STREAMS, BUCKET) if store != CALLS)
"""Without the calls of conversations under way: one that goes back makes them begin again, and a rollout that is stored
again is a duplicate."""


class Copies(NamedTuple):
    """A store at two times, and the folder of its run at the second."""

    older: Path
    newer: Path
    folder: Path
    groups: list[str]


@asynccontextmanager
async def serving(store: Path, *runs: str) -> AsyncIterator[Any]:
    """Yield the bus of the run, or those of `runs`, on one server."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer(store, ServerConfig(max_file_bytes=8 << 30)))
        buses = [
            await stack.enter_async_context(await connect(server.url, run=run, name="tests", token=server.token))
            for run in runs or (RUN,)
        ]
        yield buses if runs else buses[0]


async def grow(bus: NatsBus, make_lab, folder: Path, numbers: range, run: str = RUN) -> list[str]:
    """Store something in every stream and in the bucket, and the marks of all of it."""
    lab = make_lab(bus)
    lab.run = run
    groups = [lab.group(number) for number in numbers]
    for number, group in zip(numbers, groups, strict=True):
        seq = await lab.store(group)
        for subject in (
            subjects.event("eval", run, "live", "sums"),
            subjects.logprobs(run, "live", "sums"),
            subjects.replay("rescore", run, "again", "sums"),
            subjects.weights_heads(run),
            subjects.state(run, "governor", "live", "0"),
        ):
            await bus.publish(subject, b"%d" % number, msg_id=f"{subject}.{number}")
        await bus.put(keys.resume("sums"), b"%d" % number)
    marks = await MarkWriter.open(bus, run, folder)
    stored = await bus.get_head(ROLLOUTS, seq)
    await marks.write(StreamMark(seq, stored.time_ns), now=True)
    (folder / MARKS_FILE).write_bytes(msgspec.json.encode(marks.newest))
    return [group.id for group in groups]


@pytest.fixture
async def copies(tmp_path, streams_config, make_lab, anyio_backend) -> Copies:
    found = Copies(tmp_path / "older", tmp_path / "newer", tmp_path / "run", [])
    found.folder.mkdir()
    async with serving(found.newer) as bus:
        await bus.ensure_streams(streams_config)
        await grow(bus, make_lab, found.folder, range(6))
    shutil.copytree(found.newer, found.older)
    async with serving(found.newer) as bus:
        found.groups.extend(await grow(bus, make_lab, found.folder, range(6, 12)))
    return found


def config_of(copies: Copies) -> RunConfig:
    environments = {"sums": EnvironmentConfig(kind=f"{SUMS}:Sums", samples=2)}
    return RunConfig(run=RUN, folder=str(copies.folder), environments=environments)


def replaced(copies: Copies, to: Path, *streams: str) -> Path:
    """Return the newer store with these streams as they were in the older."""
    shutil.copytree(copies.newer, to)
    for stream in streams:
        part = next(copies.older.rglob(f"streams/{subjects.stream_name(RUN, stream)}")).relative_to(copies.older)
        shutil.rmtree(to / part)
        shutil.copytree(copies.older / part, to / part)
    return to


@pytest.mark.slow
async def test_any_stream_that_went_back_alone_is_named_and_recovered_from(copies, tmp_path, make_lab):
    config = config_of(copies)
    async with serving(replaced(copies, tmp_path / "whole")) as bus:
        await refuse_rolled_back(bus, ledger_settings(config))
        ends = {stream: (await bus.usage(stream)).last for stream in EVERY_STORE}
    newest = (copies.folder / MARKS_FILE).read_bytes()
    for stream in EVERY_STORE:
        (copies.folder / MARKS_FILE).write_bytes(newest)
        async with serving(replaced(copies, tmp_path / stream, stream)) as bus:
            with pytest.raises(HistoryLostError, match=rf"of {stream}, but .*`lachesis runs recover {RUN}`"):
                await refuse_rolled_back(bus, ledger_settings(config))
            assert {one.stream for one in await find_contradictions(bus, ledger_settings(config), folder=None)} == {
                stream
            }
            plan = await make_plan(bus, recovery_settings(config), stream)
            assert plan is not None
            await apply_plan(bus, recovery_settings(config), plan)
            await refuse_rolled_back(bus, ledger_settings(config))
            assert await make_plan(bus, recovery_settings(config), "again") is None
            if stream in subjects.fillers(RUN):
                assert (await bus.usage(stream)).last >= ends[stream], "a sequence that is named would be used again"
            kept = [bus.read(ROLLOUTS, [subjects.rollout(RUN)], headers_only=True, follow=False)]
            async with kept[0] as rollouts:
                assert len([message async for message in rollouts]) == (6 if stream == ROLLOUTS else 12)
            await grow(bus, make_lab, copies.folder, range(20, 23))
            await refuse_rolled_back(bus, ledger_settings(config))


@pytest.mark.slow
async def test_another_run_of_the_same_store_is_not_touched_by_the_damage_nor_by_the_recovery(
    copies, tmp_path, streams_config, make_lab
):
    config, folder = config_of(copies), tmp_path / "other"
    folder.mkdir()
    other = msgspec.structs.replace(config, run="other", folder=str(folder))

    async def stored(bus: NatsBus) -> list[tuple[str, int, int]]:
        return [(one.name, one.usage.last, one.usage.messages) for one in await bus.describe_streams()]

    async with serving(copies.newer, "other") as (bus,):
        await bus.ensure_streams(streams_config)
        await grow(bus, make_lab, folder, range(6), run="other")
        before = await stored(bus)
    async with serving(replaced(copies, tmp_path / "shared", ROLLOUTS, BUCKET), RUN, "other") as (bus, theirs):
        for _ in range(2):
            await refuse_rolled_back(theirs, ledger_settings(other))
            assert await make_plan(theirs, recovery_settings(other), "other") is None
            assert await stored(theirs) == before
            if await find_contradictions(bus, ledger_settings(config), folder=copies.folder):
                await recover(bus, config, "shared")
        await refuse_rolled_back(bus, ledger_settings(config))


@pytest.mark.slow
async def test_two_streams_that_went_back_are_both_named(copies, tmp_path):
    """Also where neither can tell of the other: the marks in the run's folder know both."""
    for pair in combinations(EVERY_STORE, 2):
        async with serving(replaced(copies, tmp_path / "-".join(pair), *pair)) as bus:
            found = await find_contradictions(bus, ledger_settings(config_of(copies)), folder=copies.folder)
            assert {one.stream for one in found} == set(pair)


async def test_all_but_one_stream_that_went_back_are_named(copies, tmp_path):
    """An older backup of the store, with newer rollouts in it."""
    rest = [stream for stream in EVERY_STORE if stream != ROLLOUTS]
    async with serving(replaced(copies, tmp_path / "rest", *rest)) as bus:
        found = await find_contradictions(bus, ledger_settings(config_of(copies)), folder=copies.folder)
        assert {one.stream for one in found} == set(rest)


async def test_rollouts_that_took_lost_sequences_are_stored_once_more(copies, tmp_path, make_lab):
    config = config_of(copies)
    async with serving(replaced(copies, tmp_path / "regrown", ROLLOUTS)) as bus:
        lab = make_lab(bus)
        lab.run = RUN
        new = [lab.group(number) for number in range(30, 34)]
        for group in new:
            await lab.store(group)
        with pytest.raises(HistoryLostError, match="of ROLLOUTS, but"):
            await refuse_rolled_back(bus, ledger_settings(config))
        plan = await make_plan(bus, recovery_settings(config), "regrown")
        assert plan is not None
        assert plan.copies == [7, 8, 9, 10]
        assert [(loss.stream, loss.first, loss.last) for loss in plan.losses] == [(ROLLOUTS, 7, 12)]
        await apply_plan(bus, recovery_settings(config), plan)
        async with bus.read(ROLLOUTS, [subjects.rollout(RUN)], start=13, headers_only=True, follow=False) as copied:
            groups = [Plan.unpack(message.headers.get(PLAN_HEADER)).group async for message in copied]
        assert groups == [group.id for group in new]


async def test_fillers_that_the_server_stores_late_are_no_new_loss(copies, tmp_path, monkeypatch):
    """They were sent before, and are stored after the end of the stream was read."""
    config, store_empty = config_of(copies), NatsBus.store_empty

    async def store_more(bus: NatsBus, subject: str, count: int) -> None:
        await store_empty(bus, subject, count + 5)

    monkeypatch.setattr(NatsBus, "store_empty", store_more)
    async with serving(replaced(copies, tmp_path / "late", ROLLOUTS)) as bus:
        plan = await make_plan(bus, recovery_settings(config), "late")
        assert plan is not None
        done = await apply_plan(bus, recovery_settings(config), plan)
        last = (await bus.usage(ROLLOUTS)).last
        assert last > plan.losses[0].last + 1
        assert msgspec.json.decode(done.read_bytes(), type=RecoveryPlan).losses[0].last == last
        await refuse_rolled_back(bus, ledger_settings(config))
        assert await make_plan(bus, recovery_settings(config), "again") is None


async def test_a_recovery_that_is_cut_off_anywhere_is_completed_by_the_next(copies, tmp_path, monkeypatch):
    config = config_of(copies)
    cuts = ["_fill", "_copy", "update_record", "_set_training_back", "open", "make_folder"]
    async with serving(replaced(copies, tmp_path / "cut", ROLLOUTS, EVENTS, LEDGER)) as bus:
        plan = await make_plan(bus, recovery_settings(config), "cut")
        assert plan is not None
        plan = msgspec.structs.replace(plan, copies=[3])
        for name in cuts:
            with monkeypatch.context() as patch:
                patch.setattr(*((MarkWriter, "open") if name == "open" else (recovery, name)), _killed)
                with pytest.raises(KeyboardInterrupt):
                    await apply_plan(bus, recovery_settings(config), plan)
            with pytest.raises(StartupError, match=f"complete it with `lachesis runs recover {RUN}`"):
                await refuse_rolled_back(bus, ledger_settings(config))
            plan = read_unfinished(copies.folder)
            assert plan is not None
        done = await apply_plan(bus, recovery_settings(config), plan)
        assert not (copies.folder / RECOVERY_FILE).exists()
        assert msgspec.json.decode(done.read_bytes())["id"] == "cut"
        await refuse_rolled_back(bus, ledger_settings(config))


async def test_a_recovery_whose_store_went_back_meanwhile_can_be_completed(copies, tmp_path, make_lab, monkeypatch):
    """Its plan names rollouts that are gone by now: it says so, and the next one looks at what is there."""
    config = config_of(copies)
    async with serving(replaced(copies, tmp_path / "regrown", ROLLOUTS)) as bus:
        lab = make_lab(bus)
        lab.run = RUN
        for number in range(30, 34):
            await lab.store(lab.group(number))
        plan = await make_plan(bus, recovery_settings(config), "regrown")
        assert plan is not None
        assert plan.copies
        monkeypatch.setattr(recovery, "_fill", _killed)
        with pytest.raises(KeyboardInterrupt):
            await apply_plan(bus, recovery_settings(config), plan)
    monkeypatch.undo()
    async with serving(replaced(copies, tmp_path / "older again", ROLLOUTS)) as bus:
        plan = read_unfinished(copies.folder)
        assert plan is not None
        await apply_plan(bus, recovery_settings(config), plan)
        await refuse_rolled_back(bus, ledger_settings(config))
        assert await make_plan(bus, recovery_settings(config), "again") is None


@pytest.mark.slow
async def test_a_record_that_calls_more_trimmed_than_can_have_been_is_refused_and_written_again(copies, tmp_path):
    """It would hide a loss; the ledger, which the governor cannot write, says which rollouts have no outcome yet."""
    config, store = config_of(copies), replaced(copies, tmp_path / "forged")
    entry = LedgerEntry(
        run=RUN, trainer="main", index=0, previous=GENESIS, watermark=4, resolved=b"", events_cursor=1
    )  # fmt: skip
    async with serving(store) as bus:
        await bus.publish(subjects.ledger(RUN, "main"), encode(entry), msg_id="entry")
        for trimmed, named in (
            ({ROLLOUTS: 6}, "of ROLLOUTS was trimmed below sequence 6, where 5 is the most"),
            ({EVENTS: 10**12, "NONE": 9}, "of EVENTS was trimmed below sequence 1000000000000, where"),
        ):
            await update_record(bus, RUN, lambda old, trimmed=trimmed: old.replace(trimmed=trimmed))
            marks = await MarkWriter.open(bus, RUN, copies.folder)
            await marks.write(None, now=True)  # the governor and `lachesis up` copy what they find
            (copies.folder / MARKS_FILE).write_bytes(msgspec.json.encode(marks.newest))
            (copies.folder / RETENTION_FILE).write_bytes(msgspec.json.encode(await read_record(bus, RUN)))
            with pytest.raises(HistoryLostError, match=f"{named}.*`lachesis runs recover {RUN}`"):
                await refuse_rolled_back(bus, ledger_settings(config))
            plan = await recover(bus, config, f"forged {named[3:6]}")
            assert named in str(plan.problems)
            assert not plan.losses
            expected = {ROLLOUTS: 5} | ({EVENTS: (await bus.usage(EVENTS)).last + 1} if EVENTS in trimmed else {})
            assert (await read_record(bus, RUN)).trimmed == expected


@pytest.mark.slow
async def test_what_the_record_calls_lost_and_no_recovery_noted_is_named(copies, tmp_path):
    """The governor's key could write it, to hide what it deletes; a recovery leaves its record in the folder."""
    config = config_of(copies)

    async def warned(bus: NatsBus) -> list[str]:
        return [one.text for one in [one async for one in check_fit(bus, config)] if one.level == "WARN"]

    async with serving(replaced(copies, tmp_path / "lost", ROLLOUTS)) as bus:
        await recover(bus, config, "real")
        assert (await read_record(bus, RUN)).lost
        assert await warned(bus) == []
        forged = {ROLLOUTS: [LostRange(2, 9)], EVENTS: [LostRange(3, 3)]}
        await update_record(
            bus, RUN, lambda old: old.with_lists_of(Retention(run=RUN, lost=forged, left_out={LEDGER: [2]}))
        )
        (text,) = await warned(bus)
        swept = Retention(run=RUN, swept=[ROLLOUTS])
        await update_record(bus, RUN, lambda old: old.with_lists_of(swept))
        assert "gone from within ROLLOUTS are not missed" in (await warned(bus))[0]
    assert "3 to 3 of EVENTS (lost), 2 to 6 of ROLLOUTS (lost), 2 to 2 of LEDGER (passed over)" in text


async def test_a_record_that_calls_all_of_it_chunks_hides_no_lost_end(copies, tmp_path):
    """The governor's key could write it: then a hole is not missed, but whatever a mark or a message names is."""
    config, chunks = config_of(copies), Retention(run=RUN, swept=[ROLLOUTS], orphans={TEACHER: [LostRange(1, 1 << 40)]})
    async with serving(replaced(copies, tmp_path / "lost", ROLLOUTS)) as bus:
        await update_record(bus, RUN, lambda old: old.with_lists_of(chunks))
        with pytest.raises(HistoryLostError, match="ROLLOUTS, but it ends at sequence"):
            await refuse_rolled_back(bus, ledger_settings(config))


async def commit(log: CommitLog[CurriculumEvent], number: int) -> None:
    change = log.next_commit({EVENTS: number}, msgspec.msgpack.encode([]))
    await log.append(
        CurriculumEvent(run=RUN, env="sums", revision="live", strategy="s", snapshot_id="i", commit=change, observed=[])
    )


COMMITS = subjects.event("curriculum", RUN, "live", "sums")


def opened(bus: NatsBus, term: str):
    """Open the log of the curriculum's commits, as the writer `term`."""
    return CommitLog.open(
        bus,
        CurriculumEvent,
        attrgetter("commit"),
        subject=COMMITS,
        state_subject=subjects.state(RUN, "curriculum", "live", "sums"),
        stage="curriculum",
        term=term,
    )


@pytest.mark.slow
async def test_snapshots_that_went_back_behind_trimmed_commits_are_named_and_recovered_from(copies, tmp_path):
    """Also where no marks tell of it: the commits that are left tell themselves."""
    async with serving(copies.newer) as bus:
        log, _ = await opened(bus, "a")
        await commit(log, 1)
        await log.snapshot({EVENTS: 1}, b"first")
    shutil.rmtree(copies.older)
    shutil.copytree(copies.newer, copies.older)
    async with serving(copies.newer) as bus:
        log, _ = await opened(bus, "b")
        for number in range(2, 6):
            await commit(log, number)
        await log.snapshot({EVENTS: 5}, b"fifth")
        await commit(log, 6)
        below = (await bus.last(EVENTS, COMMITS)).seq
        await update_record(bus, RUN, lambda old: old.replace(trimmed={EVENTS: below}))
        await bus.trim(EVENTS, [COMMITS], before=below)
    (copies.folder / MARKS_FILE).unlink()
    config = config_of(copies)
    async with serving(replaced(copies, tmp_path / "snapshots", LEDGER)) as bus:
        await bus.delete(keys.MARKS)
        with pytest.raises(HistoryLostError, match=r"of LEDGER, but the newest snapshot on .* is of commit 0"):
            await refuse_rolled_back(bus, ledger_settings(config))
        with pytest.raises(LedgerError, match="commits are gone"):
            await opened(bus, "c")
        plan = await make_plan(bus, recovery_settings(config), "snapshots")
        assert plan is not None
        await apply_plan(bus, recovery_settings(config), plan)
        await refuse_rolled_back(bus, ledger_settings(config))
        log, restored = await opened(bus, "d")
        assert (restored.has_gap, restored.state, log.index) == (True, b"first", 6)
        await log.snapshot({EVENTS: 6}, b"sixth")
        await refuse_rolled_back(bus, ledger_settings(config))


async def test_checkpoints_that_are_gone_are_recovered_from_though_a_stage_read_the_last_report(copies):
    """The report is deleted, since nothing is left of what it tells."""
    report = subjects.state(RUN, "trainer", subjects.LIVE, "main")
    made = TrainReport(
        run=RUN, trainer="main", lineage="a", term="t", step=1, ledger_index=0, chain="0" * 64, next_batch=1,
        policy_version="1-a-b", checkpoint="checkpoints/step-00000001",
    )  # fmt: skip
    config = config_of(copies)
    async with serving(copies.newer) as bus:
        await bus.publish(report, encode(made), msg_id="report")
        log, _ = await opened(bus, "a")
        log.marks.record(await bus.last(LEDGER, report))
        await commit(log, 1)
        plan = await make_plan(bus, recovery_settings(config), "checkpoints")
        assert plan is not None
        assert plan.report == made
        await apply_plan(bus, recovery_settings(config), plan)
        assert await bus.last(LEDGER, report) is None
        await refuse_rolled_back(bus, ledger_settings(config))
        assert await make_plan(bus, recovery_settings(config), "again") is None


@pytest.mark.parametrize("harm", ["flipped", "missing", "no sums"])
async def test_a_damaged_checkpoint_is_named_and_the_newest_whole_one_gone_on_from(copies, harm):
    """Its steps were reported, so an older one cannot be taken without a recovery."""
    folder, config = copies.folder / CHECKPOINTS, config_of(copies)
    for step in (1, 2):
        state = TrainerState(
            step=step, lineage="a", policy_version=f"{step}-a-b", ledger_position=0, chain_hash=GENESIS
        )
        newest = write_checkpoint(
            folder, state, lambda part: (part / "weights").write_bytes(bytes(100)) and None, keep=3
        )
    match harm:
        case "flipped":
            (newest / "weights").write_bytes(bytes(99) + b"x")
        case "missing":
            (newest / "weights").unlink()
        case _:
            (newest / "B3SUMS").unlink()
    report = subjects.state(RUN, "trainer", subjects.LIVE, "main")
    made = TrainReport(
        run=RUN, trainer="main", lineage="a", term="t", step=2, ledger_index=-1, chain=GENESIS, next_batch=2,
        policy_version="2-a-b", checkpoint=str(newest),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="`lachesis runs recover` makes its run go on"):
        verify_sums(newest)
    async with serving(copies.newer) as bus:
        await bus.publish(report, encode(made), msg_id="report")
        plan = await make_plan(bus, recovery_settings(config), "damaged")
        assert plan is not None
        assert [newest.name in problem for problem in plan.problems] == [True]
        assert plan.checkpoint is not None
        assert (plan.checkpoint.name, plan.checkpoint.from_step, plan.checkpoint.step) == ("step-00000001", 2, 1)
        await apply_plan(bus, recovery_settings(config), plan)
        assert await bus.last(LEDGER, report) is None
        assert latest_checkpoint(folder) == folder / "step-00000001"
        assert await make_plan(bus, recovery_settings(config), "again") is None


def _write_weights(folder: Path) -> None:
    (folder / "weights").write_bytes(bytes(100))


async def sweep_chunks(bus: NatsBus) -> None:
    """Store chunks of a large message whose head never came, and delete them as the governor does."""
    chunks = subjects.blob("rollout", RUN, "sums", secrets.token_hex(16))
    for number in range(3):
        await bus.publish(chunks, b"chunk", msg_id=f"{chunks}/{number}")

    async def note(seqs: Sequence[int]) -> None:
        await update_record(bus, RUN, lambda old: old.with_orphans(ROLLOUTS, seqs))

    assert await bus.delete_orphan_chunks(ROLLOUTS, before_ns=time.time_ns() + 10**10, note=note) == 4


def _killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def cut_end(blocks: list[Path]) -> None:
    """The last block loses its end; the index is whole."""
    data = blocks[-1].read_bytes()
    blocks[-1].write_bytes(data[: len(data) // 2])


def cut_middle(blocks: list[Path]) -> None:
    """A block before the last loses its end."""
    data = blocks[1].read_bytes()
    blocks[1].write_bytes(data[: len(data) // 2])


def drop_first(blocks: list[Path]) -> None:
    blocks[0].unlink()


def drop_middle(blocks: list[Path]) -> None:
    blocks[1].unlink()


@pytest.mark.slow
@pytest.mark.usefixtures("anyio_backend")
@pytest.mark.parametrize("stream", [ROLLOUTS, EVENTS])
@pytest.mark.parametrize("damage", [cut_end, cut_middle, drop_first, drop_middle])
async def test_what_the_server_passes_over_in_silence_is_named_and_recovered_from(
    tmp_path, streams_config, make_lab, stream: str, damage: Callable[[list[Path]], None]
):
    copies = Copies(tmp_path / "older", tmp_path / "newer", tmp_path / "run", [])
    copies.folder.mkdir()
    subject = {ROLLOUTS: subjects.rollout(RUN, "sums"), EVENTS: subjects.event("eval", RUN, "live", "sums")}[stream]
    async with serving(copies.newer) as bus:
        await bus.ensure_streams(streams_config)
        for number in range(36):
            await bus.publish(subject, bytes(1 << 19), msg_id=f"{number}")
            if number in {3, 20} and stream == ROLLOUTS:
                await sweep_chunks(bus)
        await grow(bus, make_lab, copies.folder, range(2))
        config = config_of(copies)
        await refuse_rolled_back(bus, ledger_settings(config))
    folder = next(copies.newer.rglob(f"streams/{subjects.stream_name(RUN, stream)}"))
    blocks = sorted(folder.rglob("*.blk"), key=lambda path: int(path.stem))
    assert len(blocks) > 2
    damage(blocks)
    async with serving(copies.newer) as bus:
        usage = await bus.usage(stream)
        assert usage.messages < 38
        with pytest.raises(HistoryLostError, match=f"{stream}.*lachesis runs recover"):
            await refuse_rolled_back(bus, ledger_settings(config))
        plan = await make_plan(bus, recovery_settings(config), "damaged")
        assert plan is not None
        assert sum(loss.last + 1 - loss.first for loss in plan.losses) >= 38 - usage.messages
        await apply_plan(bus, recovery_settings(config), plan)
        await refuse_rolled_back(bus, ledger_settings(config))


@pytest.mark.slow
async def test_keys_that_a_damaged_bucket_lost_are_named_and_recovered_from(copies):
    """The server starts without an error where a block of the bucket is gone, and the newest marks are in another."""
    config = config_of(copies)
    async with serving(copies.newer) as bus:
        for _ in range(9):  # fill blocks
            await bus.put(stored_key("posts"), bytes(4 << 20))
        await bus.put(keys.epoch("sums"), b"x")
        for _ in range(5):
            await bus.put(stored_key("posts"), bytes(4 << 20))
        marks = await MarkWriter.open(bus, RUN, copies.folder)
        await marks.write(None, now=True)
        await bus.put(keys.attempts("scorer", 3), b"x")
        await refuse_rolled_back(bus, ledger_settings(config))
    blocks = sorted(
        copies.newer.rglob(f"{subjects.stream_name(RUN, BUCKET)}/msgs/*.blk"), key=lambda one: int(one.stem)
    )
    assert len(blocks) > 1
    for block in blocks[:-1]:
        block.unlink()
    async with serving(copies.newer) as bus:
        assert await bus.value(keys.epoch("sums")) is None
        with pytest.raises(HistoryLostError, match=r"KEYS, but of its keys these are gone: .*epoch\.sums"):
            await refuse_rolled_back(bus, ledger_settings(config))
        plan = await recover(bus, config, "keys")
        assert plan.bucket_went_back
        await bus.put(keys.attempts("scorer", 4), b"x")
        await bus.delete_all(BUCKET, [subjects.value_subject(RUN, keys.attempts("*"))])
        await refuse_rolled_back(bus, ledger_settings(config))


async def test_a_hole_is_found_beside_more_deleted_messages_than_the_server_lists(copies, monkeypatch):
    """As in EVENTS of a long run, where alerts are kept and all around them is trimmed."""
    monkeypatch.setattr(streams, "_MAX_LISTED", 2)
    config = config_of(copies)
    eval_, score = subjects.event("eval", RUN, "live", "sums"), subjects.event("score", RUN, "live", "sums")
    async with serving(copies.newer) as bus:
        for number in range(9):
            await bus.publish(score, b"x", msg_id=f"score.{number}")
        await bus.publish(eval_, b"x", msg_id="last")
        last = (await bus.usage(EVENTS)).last
        await bus.delete_all(EVENTS, [score])
        assert await bus.missing(EVENTS) is None
        found = await find_contradictions(bus, ledger_settings(config), folder=copies.folder)
        assert [(one.stream, one.first, one.seq) for one in found] == [(EVENTS, last - 9, last - 1)]
        await update_record(bus, RUN, lambda old: old.replace(trimmed={EVENTS: last}))
        await refuse_rolled_back(bus, ledger_settings(config))


@pytest.mark.parametrize("record", [b'{"v": 99}', msgspec.msgpack.encode({"v": 99}), b"no record"])
async def test_a_record_of_what_was_trimmed_that_cannot_be_read_is_mended_by_what_the_refusal_says(copies, record):
    config = config_of(copies)
    async with serving(copies.newer) as bus:
        await update_record(bus, RUN, lambda old: old.replace(trimmed={ROLLOUTS: 4}))
        await bus.trim(ROLLOUTS, [subjects.rollout(RUN, "sums")], before=4)
        marks = await MarkWriter.open(bus, RUN, copies.folder)
        await marks.write(None, now=True)
        await bus.put(keys.RETENTION, record)
        with pytest.raises(SchemaError, match=f"let `lachesis runs recover {RUN}` write it again"):
            await read_record(bus, RUN)
        await recover(bus, config, "record")
        assert (await read_record(bus, RUN)).trimmed[ROLLOUTS] == 4


async def recover(bus: NatsBus, config: RunConfig, name: str) -> RecoveryPlan:
    """Recover as the command does, and assert that all fits then."""
    values, problems = await find_unusable_keys(bus, config)
    plan = await make_plan(bus, recovery_settings(config), name, UnusableState(keys=values, problems=problems))
    assert plan is not None
    await apply_plan(bus, recovery_settings(config), plan)
    await refuse_rolled_back(bus, ledger_settings(config))
    assert await make_plan(bus, recovery_settings(config), "again") is None
    return plan


async def stored_groups(bus: NatsBus) -> list[str]:
    async with bus.read(ROLLOUTS, [subjects.rollout(RUN)], headers_only=True, follow=False) as rollouts:
        return [Plan.unpack(message.headers.get(PLAN_HEADER)).group async for message in rollouts]


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["unreadable", "gone", "older", "the whole bucket is older"])
async def test_what_an_earlier_recovery_noted_outlives_the_record_that_lists_it(copies, tmp_path, make_lab, harm):
    """Otherwise the same loss would be found again, and rollouts that were stored once more would be stored again."""
    config, store = config_of(copies), replaced(copies, tmp_path / "regrown", ROLLOUTS)
    async with serving(store) as bus:
        lab = make_lab(bus)
        lab.run = RUN
        for number in range(30, 34):
            await lab.store(lab.group(number))
        await update_record(bus, RUN, lambda old: old.with_orphans(EVENTS, [3]).replace(left_out={LEDGER: [4]}))
        before = (await bus.value(keys.RETENTION)).value
        assert (await recover(bus, config, "first")).copies == [7, 8, 9, 10]
        kept, groups = await read_record(bus, RUN), await stored_groups(bus)
        (copies.folder / RETENTION_FILE).write_bytes(msgspec.json.encode(kept))  # as `lachesis up` does
        match harm:
            case "unreadable":
                await bus.put(keys.RETENTION, b"no record")
            case "gone":
                await bus.delete_all(BUCKET, [subjects.value_subject(RUN, keys.RETENTION)])
            case "older":
                await bus.put(keys.RETENTION, before)
    if harm == "the whole bucket is older":
        replaced(copies, tmp_path / "again", BUCKET).rename(tmp_path / "older bucket")
        bucket = f"streams/{subjects.stream_name(RUN, BUCKET)}"
        shutil.rmtree(next(store.rglob(bucket)))
        part = next((tmp_path / "older bucket").rglob(bucket))
        shutil.copytree(part, store / part.relative_to(tmp_path / "older bucket"))
    async with serving(store) as bus:
        plan = await recover(bus, config, "second")
        assert (plan.copies, [one for one in plan.losses if one.stream != BUCKET]) == ([], [])
        record = await read_record(bus, RUN)
        assert record.lost[ROLLOUTS] == kept.lost[ROLLOUTS]
        assert (record.orphans, record.left_out) == (kept.orphans, kept.left_out)
        assert await stored_groups(bus) == groups
