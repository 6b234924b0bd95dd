"""Bursts: order, drains that end and do not cut, errors that arrive, memory that is bounded; and reading to the end."""

from contextlib import asynccontextmanager

import anyio
import pytest

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.errors import InfrastructureError, LedgerError
from lachesis.pipeline.runtime.inputs import InputSource, open_bursts, read_to_end
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects

SCORES = subjects.event("score", "r", "live", "sums")
ROLLOUTS = subjects.rollout("r", "sums")
SOURCES = [InputSource(subjects.ROLLOUTS, [ROLLOUTS], 1), InputSource(subjects.EVENTS, [SCORES], 1)]


async def fill(lab, subject, count):
    for n in range(count):
        await lab.bus.publish(subject, b"%d" % n, msg_id=f"{subject}.{n}")


async def settle():
    """Let every other task run until it waits."""
    for _ in range(200):
        await anyio.lowlevel.checkpoint()


async def test_each_source_keeps_its_order_and_nothing_is_lost(lab):
    await fill(lab, SCORES, 700)
    await fill(lab, ROLLOUTS, 300)
    service = Service(lab.bus, "stage", "r")
    found = {subjects.EVENTS: [], subjects.ROLLOUTS: []}
    sizes = []
    async with open_bursts(service, SOURCES, most=64) as bursts:
        async for burst in bursts:
            await settle()
            sizes.append(len(burst))
            for message in burst:
                found[message.stream].append(message.seq)
            if sum(map(len, found.values())) == 1000:
                break
    assert found == {subjects.EVENTS: list(range(1, 701)), subjects.ROLLOUTS: list(range(1, 301))}
    assert max(sizes) <= 64
    assert max(sizes) > 1


async def test_one_message_alone_comes_without_lingering(lab):
    service = Service(lab.bus, "stage", "r")
    async with open_bursts(service, SOURCES) as bursts:
        for n in range(3):
            await lab.bus.publish(SCORES, b"x", msg_id=f"{n}")
            with anyio.fail_after(60):
                assert [message.seq for message in await anext(bursts)] == [n + 1]


async def test_a_drain_ends_the_iteration_but_not_the_burst_in_hand(lab):
    await fill(lab, SCORES, 10)
    service = Service(lab.bus, "stage", "r")
    finished = []
    with anyio.fail_after(60):
        async with open_bursts(service, SOURCES, most=4) as bursts:
            async for burst in bursts:
                await settle()  # by now as much is read ahead as may be
                service.drain()
                await settle()  # a commit takes a while, and is not to be cut off
                finished.append(len(burst))
            after = True
    assert len(finished) == 1
    assert after


async def test_a_drain_ends_a_wait_for_messages(lab):
    service = Service(lab.bus, "stage", "r")

    async def drain_soon():
        await anyio.sleep(0.02)
        service.drain()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks, open_bursts(service, SOURCES) as bursts:
            tasks.start_soon(drain_soon)
            async for _ in bursts:
                pytest.fail("there is nothing to read")


class Scripted:
    """A bus whose readers run a script."""

    def __init__(self, script):
        self.script = script

    @asynccontextmanager
    async def read(self, stream, filters, **_):
        yield self.script(stream)


async def test_an_error_in_a_reader_arrives(lab):
    async def script(stream):
        yield StoredMessage(stream, "s", 1, b"", 0)
        if stream == subjects.EVENTS:
            raise LedgerError("the stream was replaced")
        await anyio.sleep_forever()

    service = Service(Scripted(script), "stage", "r")

    async def read():
        async with open_bursts(service, SOURCES) as bursts:
            async for _ in bursts:
                pass

    with anyio.fail_after(60), pytest.raises(LedgerError, match="was replaced"):
        await read()


async def test_what_is_read_ahead_is_bounded(lab):
    read = 0

    async def endless(stream):
        nonlocal read
        while True:
            read += 1
            yield StoredMessage(stream, "s", read, b"", 0)
            await anyio.lowlevel.checkpoint()

    service = Service(Scripted(endless), "stage", "r")
    async with open_bursts(service, SOURCES, most=16) as bursts:
        await anext(bursts)
        taken = read
        await settle()
        assert read - taken <= 16 + len(SOURCES)
        ahead = read
        await settle()
        assert read == ahead


async def test_bytes_in_hand_and_ahead_are_bounded_and_a_larger_message_comes_alone(lab):
    read = []

    async def endless(stream):
        while True:
            size = 5000 if len(read) % 7 == 3 else 300
            read.append(size)
            yield StoredMessage(stream, "s", len(read), bytes(size), 0)
            await anyio.lowlevel.checkpoint()

    service = Service(Scripted(endless), "stage", "r")
    async with open_bursts(service, SOURCES, most=1000, max_bytes=4000) as bursts:
        taken = 0
        for _ in range(40):
            burst = await anext(bursts)
            taken += len(burst)
            size = sum(len(message.data) for message in burst)
            assert size <= 4000 or len(burst) == 1
            await settle()
            ahead = read[taken:]
            assert sum(sorted(ahead)[: len(ahead) - len(SOURCES)]) <= 5000
            assert ahead, "nothing is read ahead"
    assert 5000 in read


async def test_reading_to_the_end_goes_on_after_an_outage_where_it_was(lab):
    await fill(lab, SCORES, 5)
    starts, handled = [], []

    class Interrupted:
        """The bus, of which the first reader loses its server after three messages."""

        @asynccontextmanager
        async def read(self, stream, filters, *, start, **options):
            starts.append(start)
            async with lab.bus.read(stream, filters, start=start, **options) as messages:
                yield self.cut(messages) if len(starts) == 1 else messages

        async def cut(self, messages):
            async for message in messages:
                yield message
                if message.seq == 3:
                    raise InfrastructureError("the server is away")

    async def handle(message):
        handled.append(message.seq)

    with anyio.fail_after(60):
        await read_to_end(Service(Interrupted(), "stage", "r"), SOURCES[1], handle)
    assert (starts, handled) == ([1, 4], [1, 2, 3, 4, 5])
