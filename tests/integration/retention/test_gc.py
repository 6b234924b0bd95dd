"""`lachesis gc` on real servers: beside a run that goes on, on one that is over, and killed half-way."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from integration.archive.world import RUN, World, a_group, a_world
from integration.retention import test_history as history
from integration.retention.test_history import start, trains_from_its_checkpoint  # noqa: F401 - a fixture

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.retention.collector import GarbageCollector, GcLimits
from lachesis.pipeline.retention.holds import holding, read_record
from lachesis.schemas import subjects
from lachesis.schemas.calls import CALL_HEADER, CallKey
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import Batch, GroupRef, LedgerEntry, TrainReport
from lachesis.schemas.replay import OfflineTrainerRecord
from lachesis.schemas.subjects import CALLS, LEDGER, REPLAY, ROLLOUTS
from lachesis.services.stage_settings import history_settings

PAST = OfflineTrainerRecord(
    run=RUN, trainer="again", revision="short", digest="", model="", start=0, max_staleness=None, min_step=None,
    max_step=None, batch_size=8, token_budget=None, mix={}, std_floor=0.0, entries=4, batches=2, groups=2,
    chain="", manifest="", created_ns=1,
)  # fmt: skip


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[World]:
    async with a_world(tmp_path / "here") as made:
        yield made


@pytest.mark.slow
async def test_beside_a_run_it_takes_what_nobody_needs_and_the_run_goes_on(start: Any) -> None:  # noqa: F811
    async with start() as world:
        world.start()
        collected = 0
        for turn in range(4):
            await world.goes_on()
            collector = GarbageCollector(world.bus, history_settings(world.config))
            found = await collector.plan(GcLimits(older_than_s=0.0, ledger=True))
            await collector.collect(found)
            collected += sum(one.messages for one in found.decisions.values())
            if turn % 2:
                world.kill()
                await anyio.lowlevel.checkpoint()
                await trains_from_its_checkpoint(world)
                world.start()
        await world.goes_on()
        assert collected > 100
        async with world.bus.read(LEDGER, [subjects.ledger(history.RUN, "main")], follow=False) as entries:
            first = decode(LedgerEntry, (await anext(aiter(entries))).data)
        assert first.index > 0, "the ledger's beginning went too"
        world.kill("producer")


@pytest.mark.slow
async def test_what_is_held_stays(start: Any) -> None:  # noqa: F811
    async with start() as world:
        world.start()
        await world.goes_on()
        last = (await world.bus.usage(ROLLOUTS)).last
        async with holding(world.bus, history.RUN, "reader", {ROLLOUTS: last // 2}, about="a test"):
            await world.goes_on()
            collector = GarbageCollector(world.bus, history_settings(world.config))
            await collector.collect(await collector.plan(GcLimits(keep_bytes=0)))
            async with world.bus.read(ROLLOUTS, [], start=last // 2, headers_only=True, follow=False) as messages:
                kept = [message.seq async for message in messages]
            assert kept[: last // 2] == list(range(last // 2, last + 1))[: last // 2]
            assert (await read_record(world.bus, history.RUN)).trimmed[ROLLOUTS] <= last // 2
        world.kill("producer")


@pytest.mark.slow
async def test_calls_of_groups_under_way_stay_unless_they_are_older_than_asked_for(world: World) -> None:
    """The first group has ended, the second was left behind, and holds all that comes behind its start."""
    subject = subjects.call(RUN, "sums")
    ended, left = new_group_id(), new_group_id()
    for kind, group in (("start", ended), ("call", ended), ("end", ended), ("start", left), ("call", left)):
        holder, life, lease = ("p", 1, "t.1") if kind == "start" else (None, 0, None)
        headers = {CALL_HEADER: CallKey(kind, group, holder, life, lease).pack()}
        await world.bus.publish(subject, b"{}", msg_id=f"{kind}/{group}", headers=headers)
    collector = GarbageCollector(
        world.bus, history_settings(load(run_config_type(), file=world.folder / "run.toml").config)
    )
    await collector.collect(await collector.plan(GcLimits(keep_bytes=0)))
    assert (await world.bus.usage(CALLS)).messages == 2
    await collector.collect(await collector.plan(GcLimits(older_than_s=3600.0)))
    assert (await world.bus.usage(CALLS)).messages == 2
    await collector.collect(await collector.plan(GcLimits(older_than_s=0.0)))
    assert (await world.bus.usage(CALLS)).messages <= 1, "the last message of a subject stays"


@pytest.mark.slow
async def test_it_shows_first_and_names_who_keeps_what(world: World) -> None:
    stored = {await world.store(one): one for one in (a_group(n) for n in range(1, 31))}
    stored[await world.store(a_group(31, samples=8, tokens=90_000))] = a_group(31)
    await world.json("replay", "--revision", "short")
    shown = await world.json("gc")
    assert shown["deleted"] is False
    rollouts = shown["streams"]["ROLLOUTS"]
    assert (rollouts["messages"], rollouts["go"]["messages"]) == (31, 0)
    assert rollouts["bytes"] > 8 * 90_000 * 6
    assert any("scorer" in holder or "batcher" in holder or "normalizer" in holder for holder in rollouts["held"])
    assert shown["revisions"]["short"]["goes"]
    code, out, err = await world.lachesis("gc", "--older-than", "0s", "--keep-bytes", "1kB")
    assert code == 0, err
    assert "nothing was deleted" in err
    assert "the rest is kept for" in out
    assert "REPLAY short" in out
    assert (await world.bus.usage(REPLAY)).messages > 0

    assert "say what to keep" in await world.refusal("gc", "--yes")
    assert "no revision 'long' to delete; there are short" in await world.refusal("gc", "--revision", "long")
    assert "--older-than 'x'" in await world.refusal("gc", "--older-than", "x")
    async with holding(world.bus, RUN, "replay", {}, about="replay short"):
        assert "kept for replay short: end that first" in await world.refusal("gc", "--revision", "short", "--yes")
    whole = await world.json("replay", "--revision", "short")
    await world.json("gc", "--revision", "short", "--yes")
    assert (await world.bus.usage(REPLAY)).messages == 0
    assert "no revision 'short'" in await world.refusal("compare", "short", "short")
    assert (await world.json("replay", "--revision", "short"))["digest"] == whole["digest"]
    assert len(await world.groups()) == 31


class _KilledAfter:
    """The bus of somebody who is killed right after having erased his `stream`."""

    def __init__(self, bus: Any, stream: str) -> None:
        self._bus, self._stream = bus, stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def delete_all(self, stream: str, filters: list[str]) -> None:
        await self._bus.delete_all(stream, filters)
        if stream == self._stream:
            raise KeyboardInterrupt


@pytest.mark.slow
async def test_a_revision_is_not_deleted_under_whoever_writes_it(world: World) -> None:
    await world.store(a_group(1))
    await world.json("replay", "--revision", "short")
    collector = GarbageCollector(
        world.bus, history_settings(load(run_config_type(), file=world.folder / "run.toml").config)
    )
    found = await collector.plan(GcLimits(revisions=("short",)))
    async with holding(world.bus, RUN, "replay", {}, about="replay short"):
        with pytest.raises(ConfigError, match="is kept for replay short"):
            await collector.collect(found)
    await collector.collect(found)
    assert (await world.bus.usage(REPLAY)).messages == 0


@pytest.mark.slow
async def test_a_revision_is_kept_for_whoever_exports_it_or_has_yet_to_train_on_it(world: World) -> None:
    await world.store(a_group(1))
    await world.json("replay", "--revision", "short")
    collector = GarbageCollector(
        world.bus, history_settings(load(run_config_type(), file=world.folder / "run.toml").config)
    )
    old = GcLimits(older_than_s=0.0, keep_bytes=0)
    found = await collector.plan(old)
    assert [one.name for one in found.going] == ["short"]
    async with holding(world.bus, RUN, "export", {}, about="export of short to out file.jsonl"):
        assert (await collector.plan(old)).revisions[0].held == "export of short to out file.jsonl"
        with pytest.raises(ConfigError, match="is kept for export of short"):
            await collector.collect(found)

    await world.bus.publish(subjects.offline_trainer(RUN, "again"), encode(PAST), msg_id="past")
    for trained in (None, 1):
        if trained is not None:
            await world.bus.publish(*_trained(trained), msg_id=f"trained {trained}")
        with pytest.raises(ConfigError, match=f"trainer again, {trained or 0} of 2 batches done"):
            await collector.collect(found)
        assert (await collector.plan(old)).going == []
    await world.bus.publish(*_trained(2), msg_id="trained 2")
    await collector.collect(await collector.plan(old))
    assert (await world.bus.usage(REPLAY)).messages == 0


async def test_a_trainer_on_the_past_keeps_its_batches_and_nothing_else(world: World) -> None:
    made = {n: a_group(n) for n in range(1, 9)}
    for one in made.values():
        await world.store(one)
    await world.judge({n: made[n] for n in (1, 2, 3)})
    await world.bus.publish(subjects.offline_trainer(RUN, "again"), encode(PAST), msg_id="past")
    ref = GroupRef(group=made[5].id, seq=5, env="sums", sequences=4, tokens=32, policy_step=0, advantages=[9.0] * 4)
    entry = LedgerEntry(
        run=RUN, trainer="again", index=0, previous="0" * 64, watermark=0, resolved=b"", events_cursor=0,
        batch=Batch(number=0, groups=[ref], sequences=4, tokens=32), next_batch=1, outcomes=[],
    )  # fmt: skip
    await world.bus.publish(subjects.ledger(RUN, "again"), encode(entry), msg_id="past entry")
    collector = GarbageCollector(
        world.bus, history_settings(load(run_config_type(), file=world.folder / "run.toml").config)
    )
    claims = [one for one in await collector._service_claims() if one.stream == ROLLOUTS]
    assert {one.needs for one in claims if one.holder.startswith("batcher")} == {3}, "the live ledger resolved two"
    assert [one.needs for one in claims if one.holder == "trainer again, for its batches"] == [5]
    await world.bus.publish(*_trained(1), msg_id="trained 1")
    assert not any("again" in one.holder for one in await collector._service_claims())


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1, 2])
async def test_an_abandoned_trainer_on_the_past_goes_by_its_name(world: World, killed: int) -> None:
    await world.store(a_group(1))
    await world.json("replay", "--revision", "short")
    await world.bus.publish(subjects.offline_trainer(RUN, "again"), encode(PAST), msg_id="past")
    await world.bus.publish(subjects.ledger(RUN, "again"), b"an entry", msg_id="past entry")
    await world.bus.publish(*_trained(1), msg_id="trained 1")
    kept = await world.json("gc")
    assert (kept["revisions"]["short"]["held"], kept["trainers"]["again"]["goes"]) == (
        "trainer again, 1 of 2 batches done (--trainer lets it go)",
        False,
    )
    config = load(run_config_type(), file=world.folder / "run.toml").config
    both = GcLimits(revisions=("short",), trainers=("again",))
    async with holding(world.bus, RUN, "train", {}, about="train again on short"):
        with pytest.raises(ConfigError, match=f"trainer again of run {RUN} is at work: stop it first"):
            await GarbageCollector(world.bus, history_settings(config)).plan(both)
    for _ in range(killed):
        dying = GarbageCollector(_KilledAfter(world.bus, LEDGER), history_settings(config))  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            await dying.collect(await dying.plan(both))
    await world.json("gc", "--trainer", "again", "--revision", "short", "--yes")
    assert (await world.bus.usage(REPLAY)).messages == 0
    assert (
        await world.bus.stored_subjects(LEDGER, [subjects.offline_trainer(RUN, "*"), subjects.ledger(RUN, "*")]) == []
    )
    with pytest.raises(NotFoundError, match="no offline trainer 'again' to delete; there are none"):
        await GarbageCollector(world.bus, history_settings(config)).plan(GcLimits(trainers=("again",)))


def _trained(batches: int) -> tuple[str, bytes]:
    """Return the report of a trainer that has trained on so many batches, and where it goes."""
    report = TrainReport(
        run=RUN, trainer="again", lineage="", term="t", step=batches, ledger_index=batches - 1, chain="",
        next_batch=batches, policy_version="", checkpoint="",
    )  # fmt: skip
    return subjects.state(RUN, "trainer", subjects.LIVE, "again"), encode(report)


async def test_what_is_held_since_it_was_found_stays(world: World) -> None:
    for n in range(1, 21):
        await world.store(a_group(n))
    collector = GarbageCollector(
        world.bus, history_settings(load(run_config_type(), file=world.folder / "run.toml").config)
    )
    found = await collector.plan(GcLimits())
    found.decisions[ROLLOUTS].before[subjects.rollout(RUN, "sums")] = 10
    async with holding(world.bus, RUN, "reader", {ROLLOUTS: 5}, about="a test"):
        await collector.collect(found)
        assert (await world.bus.usage(ROLLOUTS)).first == 5
        assert (await read_record(world.bus, RUN)).trimmed[ROLLOUTS] == 5
    await collector.collect(found)
    assert (await world.bus.usage(ROLLOUTS)).first == 10
