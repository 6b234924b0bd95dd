"""What a bus says of a message that its store cannot read any more: never that there is none."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from integration.damage import damage_message

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.config import ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.errors import DamagedError, FencedError
from lachesis.schemas import subjects
from lachesis.schemas.subjects import BUCKET, EVENTS, LEDGER, stream_name

LINE = subjects.ledger("run", "main")
OTHER = subjects.ledger("run", "other")
MATH, CODE = (subjects.event("score", "run", "live", env) for env in ("math", "code"))


class Store:
    """A bus, and a way to damage what it has stored."""

    def __init__(self, bus: Bus, server: EmbeddedServer | None) -> None:
        self.bus = bus
        self._server = server

    async def damage(self, stream: str, marker: bytes) -> None:
        if self._server is not None:
            await damage_message(self._server, stream_name("run", stream), marker)
            return
        assert isinstance(self.bus, MemoryBus)
        async with self.bus.read(stream, [], follow=False) as messages:
            (seq,) = [message.seq async for message in messages if marker in message.data]
        self.bus.damage(stream, seq)

    async def damage_value(self, key: str, marker: bytes) -> None:
        if isinstance(self.bus, MemoryBus):
            self.bus.damage_value(key)
        else:
            await self.damage(BUCKET, marker)


@pytest.fixture(params=["memory", "nats"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, streams_config: StreamsConfig, anyio_backend: str
) -> AsyncIterator[Store]:
    if request.param == "memory":
        async with MemoryBus() as memory:
            yield Store(memory, None)
        return
    async with (
        EmbeddedServer(tmp_path / "store", ServerConfig(max_file_bytes=4 << 30)) as server,
        await connect(server.url, run="run", name="tests", token=server.token) as bus,
    ):
        await bus.ensure_streams(streams_config)
        yield Store(bus, server)


async def test_a_damaged_newest_message_is_an_error_and_not_none(store: Store) -> None:
    bus, seq = store.bus, 0
    for i in range(5):
        seq = await bus.commit(LINE, b"entry-%d" % i, expected=seq, msg_id=str(i))
    await bus.commit(OTHER, b"another", expected=0, msg_id="other")
    await store.damage(LEDGER, b"entry-4")
    with pytest.raises(DamagedError, match=r"counts 5 messages on rl\.ledger\.run\.main"):
        await bus.last(LEDGER, LINE)
    with pytest.raises(DamagedError):  # a writer that knew of it hears of that as well, and stores nothing
        await bus.commit(LINE, b"entry-5", expected=seq, msg_id="5")
    assert (await bus.extent(LEDGER, LINE)).messages == 5
    last = await bus.last(LEDGER, OTHER)
    assert last is not None
    assert last.data == b"another"
    assert await bus.last(LEDGER, subjects.ledger("run", "none")) is None


async def test_the_only_message_of_a_subject_may_be_the_damaged_one(store: Store) -> None:
    await store.bus.commit(LINE, b"the-only-one", expected=0, msg_id="1")
    await store.damage(LEDGER, b"the-only-one")
    with pytest.raises(DamagedError):
        await store.bus.last(LEDGER, LINE)


async def test_what_was_deleted_on_purpose_is_none(store: Store) -> None:
    await store.bus.put("run", b"a-value")
    await store.bus.delete("run")
    assert await store.bus.value("run") is None


async def test_a_damaged_value_is_an_error_until_it_is_set_anew(store: Store) -> None:
    bus = store.bus
    await bus.put("run", b"a-first-value")
    await bus.put("elsewhere", b"another-value")
    await store.damage_value("run", b"a-first-value")
    with pytest.raises(DamagedError, match="key run"):
        await bus.value("run")
    assert await bus.value("never") is None
    with pytest.raises(FencedError):
        await bus.put("elsewhere", b"", revision=0)
    await bus.put("run", b"a-second-value", revision=0)  # to the server it is not there
    entry = await bus.value("run")
    assert entry is not None
    assert entry.value == b"a-second-value"


@pytest.mark.parametrize("damaged", [1, 3, 4])
async def test_readers_pass_over_what_is_damaged_and_end(store: Store, damaged: int) -> None:
    bus = store.bus
    for i in range(5):
        await bus.publish(MATH if i % 2 else CODE, b"score-%d" % i, msg_id=str(i))
    await store.damage(EVENTS, b"score-%d" % damaged)
    for filters, expected in (([MATH, CODE], {0, 1, 2, 3, 4}), ([MATH], {1, 3}), ([CODE], {0, 2, 4})):
        async with bus.read(EVENTS, filters, follow=False) as messages:
            found = [message.data async for message in messages]
        assert found == [b"score-%d" % i for i in sorted(expected - {damaged})]


async def test_a_reader_goes_on_behind_a_damaged_end(store: Store) -> None:
    bus = store.bus
    for i in range(3):
        await bus.publish(MATH, b"score-%d" % i, msg_id=str(i))
    await store.damage(EVENTS, b"score-2")
    async with bus.read(EVENTS, [MATH], start=4) as messages:  # a reader of all three goes on with the next
        await bus.publish(MATH, b"score-3", msg_id="3")
        assert (await anext(aiter(messages))).data == b"score-3"
