"""Marks of what was read: a stream that lost it, or holds another message there, is refused; a trimmed one is not."""

import pytest

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.errors import HistoryLostError
from lachesis.pipeline.runtime import stream_marks
from lachesis.pipeline.runtime.stream_marks import StreamMarks, check_marks
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import StreamMark
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.retention import Retention
from lachesis.schemas.subjects import EVENTS

SUBJECT = subjects.event("score", "r", "live", "sums")


@pytest.fixture(autouse=True)
def _convinced_at_once(monkeypatch):
    monkeypatch.setattr(stream_marks, "BELIEVE_LOSS_S", 0.0)


async def filled(bus, messages=5):
    marks = StreamMarks()
    for number in range(messages):
        await bus.publish(SUBJECT, b"%d" % number, msg_id=str(number))
    async with bus.read(EVENTS, [SUBJECT], follow=False) as stored:
        async for message in stored:
            marks.record(message)
    return marks.newest


async def test_what_is_still_there_passes_and_survives_a_header():
    async with MemoryBus() as bus:
        marks = await filled(bus)
        assert marks[EVENTS].seq == 5
        await check_marks(bus, "r", marks, writer="a test")
        assert StreamMarks.from_header(StreamMarks(marks).to_header()).newest == marks
        assert StreamMarks.from_header(None).newest == {}
    with pytest.raises(SchemaError, match="Lachesis-Read"):
        StreamMarks.from_header('{"EVENTS":[0,1]}')


async def test_an_older_message_never_replaces_a_newer_mark():
    async with MemoryBus() as bus:
        marks = StreamMarks(await filled(bus))
        marks.record(await bus.get(EVENTS, 2))
        assert marks.newest[EVENTS].seq == 5


async def test_a_stream_that_ends_before_is_refused():
    async with MemoryBus() as bus:
        await filled(bus)
        with pytest.raises(HistoryLostError, match=r"a test has read .* EVENTS up to sequence 9, but it ends at .* 5"):
            await check_marks(bus, "r", {EVENTS: StreamMark(9, 1)}, writer="a test")


async def test_another_message_under_the_same_sequence_is_refused():
    async with MemoryBus() as bus:
        marks = await filled(bus)
        other = {EVENTS: StreamMark(5, marks[EVENTS].stored_ns - 1)}
        with pytest.raises(HistoryLostError, match="another message is stored there now"):
            await check_marks(bus, "r", other, writer="a test")


async def test_a_hole_is_trimming_only_if_the_trim_was_recorded():
    async with MemoryBus() as bus:
        marks = await filled(bus, 5)
        await bus.publish(SUBJECT, b"later", msg_id="later")
        await bus.trim(EVENTS, [SUBJECT], before=6)
        with pytest.raises(HistoryLostError, match="is gone, and history was trimmed below sequence 1 alone"):
            await check_marks(bus, "r", marks, writer="a test")
        await bus.put(keys.RETENTION, encode(Retention(run="r", trimmed={EVENTS: 6})))
        await check_marks(bus, "r", marks, writer="a test")
        await bus.put(keys.RETENTION, b"\xc1")
        with pytest.raises(HistoryLostError, match="whether it was trimmed is not known: the key 'retention' of run r"):
            await check_marks(bus, "r", marks, writer="a test")
