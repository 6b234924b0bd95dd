"""Annotations that cannot be read: rollouts that wait for them get an outcome, and what a newer build wrote is kept."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
from integration.batcher.test_batcher import ENV, RUN, World, batcher, fates, make_config, read_until
from stages import run_batcher, run_curriculum, run_normalizer

from lachesis.pipeline.bus import newer_writers
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import leaves
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.feed import BatchFeed
from lachesis.schemas import codec, subjects
from lachesis.schemas.annotations import DeadLetter, GroupScore, RewardEvent, ScoreEvent
from lachesis.schemas.codec import SCHEMA_VERSION, decode, encode
from lachesis.schemas.errors import VersionError
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import RolloutGroup
from lachesis.services.process import service_process as process


def reasons(entries: list[LedgerEntry]) -> dict[int, str | None]:
    return {outcome.seq: outcome.reason for entry in entries for outcome in entry.outcomes}


async def letters_after(bus: Bus, seq: int) -> list[DeadLetter]:
    async with bus.read(
        subjects.EVENTS, [subjects.event("dead", RUN, "live")], start=seq + 1, follow=False
    ) as messages:
        return [decode(DeadLetter, message.data) async for message in messages]


async def next_letter(bus: Bus, seq: int, count: int = 1) -> None:
    """Wait for so many letters stored after `seq`."""
    with anyio.fail_after(60):
        async with bus.read(subjects.EVENTS, [subjects.event("dead", RUN, "live")], start=seq + 1) as messages:
            for _ in range(count):
                await anext(aiter(messages))


async def next_reward(bus: Bus, after: int) -> RewardEvent:
    with anyio.fail_after(60):
        async with bus.read(subjects.EVENTS, [subjects.event("reward", RUN, "live")], start=after + 1) as messages:
            return decode(RewardEvent, (await anext(aiter(messages))).data)


async def unreadable(bus: Bus, kind: subjects.Kind, env: str = ENV) -> int:
    return (await bus.publish(subjects.event(kind, RUN, "live", env), b"?", msg_id=f"unreadable.{kind}.{env}")).seq


async def test_whoever_waits_for_what_cannot_be_read_is_given_up_and_the_others_go_on(bus: Bus) -> None:
    world = World(bus)
    waiting = [await world.rollout() for _ in range(2)]
    scored = [await world.rollout() for _ in range(2)]
    lost = await unreadable(bus, "reward")
    await world.reward(*scored)
    async with batcher(bus, make_config(lost_deadline_s=0.3)):
        entries = await read_until(bus, outcomes=4, batches=1)
        await next_letter(bus, lost, 3)  # they are stored beside the entries
        later = await world.rollout()
        with anyio.move_on_after(1.0) as patience:  # longer than the deadline of the others
            await read_until(bus, outcomes=5)
    assert patience.cancelled_caught, "what came after the loss has nothing to do with it"
    expected = {seq: "dead" for seq, _ in waiting} | {seq: "batched" for seq, _ in scored}
    assert fates(entries) == expected
    assert later[0] not in expected
    for seq, _ in waiting:
        assert f"cannot be read at sequence {lost} of EVENTS" in str(reasons(entries)[seq])
    found = [(letter.stream, letter.seq, letter.kind) for letter in await letters_after(bus, lost)]
    assert sorted(found) == sorted([("EVENTS", lost, "data"), *(("ROLLOUTS", seq, "deadline") for seq, _ in waiting)])


async def test_the_loss_is_not_forgotten_by_a_restart() -> None:
    async with MemoryBus() as bus:
        world = World(bus)
        waiting = await world.rollout()
        lost = await unreadable(bus, "reward")
        async with batcher(bus, make_config(lost_deadline_s=3600.0)):
            await next_letter(bus, lost)
            # an entry written after the letter was read: a restart goes on from there
            await anyio.wait_all_tasks_blocked()
            bad = await bus.publish(subjects.rollout(RUN, ENV), b"?", msg_id="bad", headers={PLAN_HEADER: "1"})
            (entry,) = await read_until(bus, outcomes=1)
        assert fates([entry]) == {bad.seq: "dead"}
        assert entry.events_cursor == lost
        async with batcher(bus, make_config(lost_deadline_s=0.2)):
            assert fates(await read_until(bus, outcomes=2)) == {bad.seq: "dead", waiting[0]: "dead"}


async def test_the_loss_of_one_environment_is_not_anothers() -> None:
    async with MemoryBus() as bus:
        world = World(bus)
        await world.rollout()
        await unreadable(bus, "reward", env="other")
        async with batcher(bus, make_config(lost_deadline_s=0.1)):
            with anyio.move_on_after(0.5) as patience:
                await read_until(bus, outcomes=1)
        assert patience.cancelled_caught


async def test_a_lost_pointer_of_a_teacher_without_a_deadline_is_not_waited_for() -> None:
    async with MemoryBus() as bus:
        world = World(bus)
        groups = [await world.rollout() for _ in range(2)]
        await world.reward(*groups)
        await unreadable(bus, "teacher")
        config = make_config(teacher="optional", teacher_deadline_s=None, lost_deadline_s=0.2)
        async with batcher(bus, config):
            batch = (await read_until(bus, batches=1))[-1].batch
        assert batch
        assert [ref.teacher for ref in batch.groups] == [None, None]


def run_config(*, lost_deadline_s: float = 0.3) -> RunConfig:
    config = make_config(lost_deadline_s=lost_deadline_s, max_staleness=10**6)
    environment = EnvironmentConfig(kind="reasoning_gym", params={"dataset": "spell_backward", "size": 4})
    return msgspec.structs.replace(config, environments={ENV: environment})


async def score(bus: Bus, seq: int, group: RolloutGroup) -> None:
    item = GroupScore(
        group=group.id, seq=seq, item="i", policy_step=0, scores=[0.0, 1.0, 0.0, 1.0], ratings={}, lengths=[1] * 4
    )
    event = ScoreEvent(run=RUN, env=ENV, revision="live", ensemble="e", raters={}, groups=[item])
    await bus.publish(subjects.event("score", RUN, "live", ENV), encode(event), msg_id=f"score.{seq}")


@pytest.mark.parametrize("kind", ["score", "dead"])
async def test_an_unreadable_score_holds_up_neither_its_groups_nor_the_windows_after_them(
    bus: Bus, kind: subjects.Kind
) -> None:
    """The normalizer closes a window once all its members have an outcome; groups two windows on wait for that."""
    world, config = World(bus), run_config()
    width = config.normalization.window
    groups = [await world.rollout() for _ in range(4 * width)]
    lost = await unreadable(bus, kind)  # of the first group, which is not known
    for seq, group in groups[1:]:
        await score(bus, seq, group)
    async with batcher(bus, config), anyio.create_task_group() as tasks:
        tasks.start_soon(run_normalizer, Service(bus, "normalizer", RUN), config)
        entries = await read_until(bus, outcomes=len(groups) - 1)  # all but one, which fills no batch
        tasks.cancel_scope.cancel()
    found = fates(entries)
    assert found.pop(groups[0][0]) == "dead"
    assert f"cannot be read at sequence {lost} of EVENTS" in str(reasons(entries)[groups[0][0]])
    assert set(found.values()) == {"batched"}
    assert len(found) >= 2 * width


async def test_a_normalizer_that_starts_again_still_knows_of_the_loss() -> None:
    async with MemoryBus() as bus:
        world, config = World(bus), run_config()
        never = msgspec.structs.replace(
            config, batching=msgspec.structs.replace(config.batching, lost_deadline_s=3600.0)
        )
        groups = [await world.rollout() for _ in range(2 * config.normalization.window)]
        lost = await unreadable(bus, "score")
        for seq, group in groups[1:]:
            await score(bus, seq, group)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_normalizer, Service(bus, "normalizer", RUN), never)
            commit = await next_reward(bus, after=lost)
            tasks.cancel_scope.cancel()
        assert commit.commit.cursors[subjects.EVENTS] == lost
        async with batcher(bus, config), anyio.create_task_group() as tasks:
            tasks.start_soon(run_normalizer, Service(bus, "normalizer", RUN), config)
            entries = await read_until(bus, outcomes=len(groups) - 1)
            tasks.cancel_scope.cancel()
        assert fates(entries)[groups[0][0]] == "dead"


async def test_a_score_that_was_stored_before_the_deadline_counts_though_it_is_read_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A writer that cannot commit, because EVENTS is full say, reads nothing more until it can."""
    async with MemoryBus() as bus:
        world, config = World(bus), run_config(lost_deadline_s=1.0)
        width, commit, held, freed = config.normalization.window, bus.commit, anyio.Event(), anyio.Event()

        async def held_up(*args: Any, **kwargs: Any) -> int:
            held.set()
            await freed.wait()
            return await commit(*args, **kwargs)

        monkeypatch.setattr(bus, "commit", held_up)
        groups = [await world.rollout() for _ in range(3 * width)]
        lost = await unreadable(bus, "score")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_normalizer, Service(bus, "normalizer", RUN), config)
            await next_letter(bus, lost)
            await score(bus, *groups[0])
            await held.wait()
            for seq, group in groups[1:]:
                await score(bus, seq, group)
            await anyio.sleep(2 * config.batching.lost_deadline_s)
            freed.set()
            rewarded: set[int] = set()
            with anyio.fail_after(60):
                async with bus.read(subjects.EVENTS, [subjects.event("reward", RUN, "live", ENV)]) as rewards:
                    async for message in rewards:
                        rewarded |= {item.seq for item in decode(RewardEvent, message.data).groups}
                        if len(rewarded) == len(groups):
                            break
            tasks.cancel_scope.cancel()
        assert len(await letters_after(bus, 0)) == 1  # that of the message itself


@pytest.mark.parametrize(
    ("stage", "run", "kind", "writer"),
    [
        ("batcher", run_batcher, "reward", "normalizer"),
        ("batcher", run_batcher, "dead", "scorer"),
        ("normalizer", run_normalizer, "score", "scorer"),
        ("normalizer", run_normalizer, "dead", "teacher"),
        ("curriculum", run_curriculum, "reward", "normalizer"),
    ],
)
async def test_what_a_newer_build_wrote_stops_its_reader_and_is_read_by_the_upgraded_one(
    stage: str,
    run: Callable[[Service, RunConfig], Awaitable[None]],
    kind: subjects.Kind,
    writer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with MemoryBus() as bus, newer_service(bus, writer):
        await World(bus).rollout()
        newer = msgspec.msgpack.encode({"v": SCHEMA_VERSION + 1})
        await bus.publish(subjects.event(kind, RUN, "live", ENV), newer, msg_id="newer")
        with anyio.fail_after(60), pytest.raises(BaseExceptionGroup) as stopped:
            await run(Service(bus, stage, RUN), run_config())
        assert {type(error) for error in leaves(stopped.value)} == {VersionError}
        text = str(leaves(stopped.value)[0])
        assert f"sequence 1 of EVENTS (rl.{kind}.{RUN}.live.{ENV}), written by {writer}" in text
        assert "upgrade this service" in text
        assert len(await letters_after(bus, 1)) == 0  # it is not bad, so it was not given up
        monkeypatch.setattr(codec, "SCHEMA_VERSION", SCHEMA_VERSION + 1)  # upgraded; it still makes no sense, though
        service = Service(bus, stage, RUN)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, service, run_config())
            await next_letter(bus, 1)
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def newer_service(bus: Bus, name: str) -> AsyncIterator[None]:
    """Send the heartbeats of a service that writes the next schema version."""
    service = Service(bus, name, RUN)

    async def beat() -> None:
        while True:
            with pytest.MonkeyPatch.context() as newer:
                newer.setattr(codec, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
                await service.heartbeat()
            await anyio.sleep(0.05)

    async with background() as tasks:
        tasks.start_soon(beat)
        yield


@pytest.mark.parametrize(
    ("stage", "run", "kind"),
    [
        ("batcher", run_batcher, "reward"),
        ("batcher", run_batcher, "dead"),
        ("normalizer", run_normalizer, "score"),
        ("curriculum", run_curriculum, "reward"),
    ],
)
async def test_a_message_of_a_version_that_none_of_its_writers_writes_is_a_dead_letter(
    stage: str,
    run: Callable[[Service, RunConfig], Awaitable[None]],
    kind: subjects.Kind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(newer_writers, "LISTEN_S", 0.1)
    monkeypatch.setattr(newer_writers, "LISTEN_TO_NOBODY_S", 0.1)
    async with MemoryBus() as bus, newer_service(bus, "trainer"):  # it may write none of them
        forged = msgspec.msgpack.encode({"v": SCHEMA_VERSION + 1})
        seq = (await bus.publish(subjects.event(kind, RUN, "live", ENV), forged, msg_id="forged")).seq
        async with background() as tasks:
            tasks.start_soon(run, Service(bus, stage, RUN), run_config())
            await next_letter(bus, seq)
        [letter] = await letters_after(bus, seq)
        assert (letter.stage, letter.stream, letter.seq) == (stage, subjects.EVENTS, seq)
        assert f"schema version {SCHEMA_VERSION + 1}" in letter.reason


async def test_a_trainer_too_old_for_a_batch_stops_instead_of_leaving_it_out() -> None:
    async with MemoryBus() as bus, newer_service(bus, "scorer"):  # what made the rollouts may be gone by now
        world = World(bus)
        scored = []
        for n in range(2):
            _, group = await world.rollout()
            newer = msgspec.msgpack.decode(encode(group)) | {"v": SCHEMA_VERSION + 1, "counter": 100 + n}
            headers = {PLAN_HEADER: Plan.of(group.replace(counter=100 + n, id=new_group_id())).pack()}
            data = msgspec.msgpack.encode(newer | {"id": headers[PLAN_HEADER].split()[1]})
            ack = await bus.publish(subjects.rollout(RUN, ENV), data, msg_id=f"newer.{n}", headers=headers)
            scored.append((ack.seq, group.replace(id=headers[PLAN_HEADER].split()[1])))
        await world.reward(*scored)
        async with batcher(bus, make_config()):
            await read_until(bus, batches=1)
        feed = await BatchFeed.open(bus, RUN, "main", term="t")
        async with aclosing(feed.batches()) as batches:
            with anyio.fail_after(60), pytest.raises(VersionError, match="upgrade this service"):
                await anext(batches)


def test_a_service_that_meets_a_newer_build_ends_as_one_that_cannot_start(caplog: pytest.LogCaptureFixture) -> None:
    error = VersionError("ScoreEvent: schema version 2 is newer; upgrade this service")
    assert process._explain(BaseExceptionGroup("", [ExceptionGroup("", [error]), error])) == process.EXIT_STARTUP
    assert [record.getMessage() for record in caplog.records][-1] == str(error)
    assert "Traceback" not in caplog.text
