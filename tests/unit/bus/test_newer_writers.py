"""Whether a message of a newer version is believed: only on the word of a service that may write its subject."""

import anyio
import anyio.lowlevel
import msgspec
import pytest

from lachesis.pipeline.bus import newer_writers
from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.bus.newer_writers import (
    confirm_newer,
    confirm_newer_value,
    follow_writers,
    hear_all_writers,
    writers_of,
)
from lachesis.pipeline.common.background_tasks import background
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import SCHEMA_VERSION
from lachesis.schemas.errors import VersionError

NEWER = SCHEMA_VERSION + 1
DEAD = StoredMessage("EVENTS", "rl.dead.r.live.sums", 7, msgspec.msgpack.encode({"v": NEWER}), 0)
ERROR = VersionError(f"DeadLetter: schema version {NEWER} is newer; upgrade this service", NEWER)


@pytest.fixture
async def bus(monkeypatch):
    monkeypatch.setattr(newer_writers, "LISTEN_S", 0.1)
    monkeypatch.setattr(newer_writers, "LISTEN_TO_NOBODY_S", 0.1)
    async with MemoryBus() as made:
        yield made


async def while_saying(bus, service, said, ask, run="r"):
    """Await `ask` while `service` sends heartbeats."""

    async def beat():
        while True:
            await bus.broadcast(subjects.heartbeat(run, service, "i"), msgspec.msgpack.encode(said))
            await anyio.sleep(0.005)

    async with background() as tasks:
        tasks.start_soon(beat)
        await ask


@pytest.mark.extension
@pytest.mark.parametrize(
    ("subject", "writers"),
    [
        ("rl.dead.r.live.sums", ("batcher", "curriculum", "normalizer", "scorer", "teacher")),
        ("rl.eval.r.live.sums", ("evaluator",)),
        ("rl.ledger.r.main", ("batcher",)),
        ("rl.rollout.r.sums", ("environment-sums", "gateway")),
        ("rl.blob.rollout.r.sums.x", ("environment-sums", "gateway", "governor")),
        ("rl.state.r.trainer.live.main", ("gateway", "trainer")),
        ("rl.state.r.normalizer.live.sums", ("normalizer",)),
        ("rl.replay.revision.r.v2.all", ()),
        (subjects.value_subject("r", keys.POLICY), ("gateway", "trainer")),
        (subjects.value_subject("r", keys.epoch("sums")), ("environment-sums",)),
    ],
)
def test_the_table_of_permissions_says_who_writes_a_subject(subject, writers):
    assert writers_of("r", subject) == writers


async def test_a_writer_that_says_so_is_believed_and_the_place_is_named(bus):
    with pytest.raises(VersionError) as raised:
        await while_saying(bus, "scorer", {"v": 1, "schema_version": NEWER}, confirm_newer(bus, DEAD, ERROR))
    assert "sequence 7 of EVENTS (rl.dead.r.live.sums), written by scorer" in str(raised.value)
    assert raised.value.version == NEWER


async def test_a_heartbeat_that_is_itself_of_the_version_says_so_too(bus):
    said = {"v": NEWER, "what": "this build cannot read"}
    with pytest.raises(VersionError, match="the key 'policy', written by trainer"):
        await while_saying(bus, "trainer", said, confirm_newer_value(bus, "r", keys.POLICY, ERROR))


@pytest.mark.parametrize(
    ("service", "said", "run"),
    [
        ("health", {"v": 1, "schema_version": NEWER}, "r"),  # no dead letters of its own
        ("environment-sums", {"v": 1, "service": "scorer", "schema_version": NEWER}, "r"),  # in another's name
        ("scorer", {"v": 1, "schema_version": NEWER}, "other"),
        ("scorer", {"v": 1, "schema_version": SCHEMA_VERSION}, "r"),
        ("scorer", {"v": 1}, "r"),  # nothing of versions
        ("scorer", {"v": 1, "schema_version": "4"}, "r"),
    ],
)
async def test_nobody_else_is_believed(bus, service, said, run):
    await while_saying(bus, service, said, confirm_newer(bus, DEAD, ERROR), run)


async def test_a_flood_is_asked_about_once_a_minute(bus, monkeypatch):
    asked = []
    monkeypatch.setattr(newer_writers, "_listen", lambda *args: asked.append(args[2]) or anyio.lowlevel.checkpoint())
    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(confirm_newer, bus, DEAD, ERROR)
    assert len(asked) == 1
    later = newer_writers.time.monotonic() + 61
    monkeypatch.setattr(newer_writers.time, "monotonic", lambda: later)
    await confirm_newer(bus, DEAD, ERROR)
    assert len(asked) == 2


async def test_people_wait_once_for_the_writers_of_all_subjects(bus, monkeypatch):
    hear_all_writers(bus)
    said = {"v": 1, "schema_version": NEWER}
    await while_saying(bus, "batcher", said, confirm_newer_value(bus, "r", keys.epoch("sums"), ERROR))
    monkeypatch.setattr(newer_writers, "_listen", None)
    await confirm_newer_value(bus, "r", keys.POLICY, ERROR)
    with pytest.raises(VersionError, match="written by batcher"):
        await confirm_newer(bus, DEAD, ERROR)


async def test_a_writer_upgraded_within_that_minute_is_believed_without_another_wait(bus, monkeypatch):
    said = {"v": 1, "schema_version": NEWER}
    async with background() as tasks:
        tasks.start_soon(follow_writers, bus, "r")
        await confirm_newer(bus, DEAD, ERROR)
        monkeypatch.setattr(newer_writers, "_listen", None)
        await confirm_newer(bus, DEAD, ERROR)
        with anyio.fail_after(10):
            while not newer_writers._HEARD[bus].versions:
                await bus.broadcast(subjects.heartbeat("r", "teacher", "i"), msgspec.msgpack.encode(said))
                await anyio.sleep(0.005)
        with pytest.raises(VersionError, match="written by teacher"):
            await confirm_newer(bus, DEAD, ERROR)


async def test_what_only_an_operator_may_write_is_believed_at_once(bus):
    revision = StoredMessage("REPLAY", subjects.revision("r", "v2"), 3, b"", 0)
    with pytest.raises(VersionError, match=r"sequence 3 of REPLAY .* written by an operator"):
        await confirm_newer(bus, revision, ERROR)
