"""The leader's word on a subject: "not found" is believed only with a count of 0, damage only after another look."""

import base64
import math
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.bus import leader
from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.errors import DamagedError, NotFoundError

NOT_FOUND = {"error": {"code": 404, "err_code": 10037, "description": "no message found"}}
NO_STREAM = {"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}


def found(seq):
    data = base64.b64encode(b"data").decode()
    return {"message": {"subject": "a.b", "seq": seq, "time": "2026-01-01T00:00:00Z", "data": data}}


def counts(messages, last=9):
    subjects = {"a.b": messages} if messages else None
    state = {"messages": messages, "bytes": 1, "first_seq": 1, "last_seq": last, "subjects": subjects}
    return {"config": {}, "state": state}


class Leader:
    """Gives prepared answers in order, and notes the requests."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def call_raw(self, subject, request, *, what, patient=False, give_up_s=None):
        self.asked.append((subject.split(".")[3], msgspec.json.decode(request) if request else None, patient))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return SimpleNamespace(data=msgspec.json.encode(answer))


async def test_a_message_that_is_there_costs_one_question():
    link = Leader(found(3))
    assert (await leader.last(link, "S", "a.b", patient=True)).seq == 3
    assert link.asked == [("MSG", {"last_by_subj": "a.b"}, True)]


async def test_none_is_what_is_not_counted_either():
    link = Leader(NOT_FOUND, counts(0))
    assert await leader.last(link, "S", "a.b") is None
    assert link.asked[1] == ("INFO", {"subjects_filter": "a.b"}, False)


@pytest.mark.parametrize("believe_s", [leader._BELIEVE_ABSENCE_S, 0.0])
async def test_one_that_is_stored_between_the_two_questions_is_found(monkeypatch, believe_s):
    """Also where the second answer comes so late that its time is over."""
    monkeypatch.setattr(leader, "_BELIEVE_ABSENCE_S", believe_s)
    link = Leader(NOT_FOUND, counts(1), found(4))
    assert (await leader.last(link, "S", "a.b")).seq == 4


async def test_one_that_is_deleted_between_them_is_none():
    link = Leader(NOT_FOUND, counts(1), NOT_FOUND, counts(0))
    assert await leader.last(link, "S", "a.b") is None


async def test_what_is_counted_and_never_found_is_damaged(monkeypatch):
    monkeypatch.setattr(leader, "_BELIEVE_ABSENCE_S", 0.0)
    link = Leader(NOT_FOUND, counts(7), NOT_FOUND, counts(7), counts(7, last=2), found(1), NOT_FOUND)
    with pytest.raises(DamagedError, match=r"counts 7 messages on a\.b, .*newest that can be read is at sequence 1\)"):
        await leader.last(link, "S", "a.b")


async def test_no_stream_is_no_damage():
    with pytest.raises(NotFoundError, match="stream not found"):
        await leader.last(Leader(NO_STREAM), "S", "a.b")


@given(st.sets(st.integers(1, 2000)), st.integers(0, 2000))
def test_the_newest_that_reads_is_found_by_halves(readable, end):
    readable = {seq for seq in readable if seq <= end}
    asked = []

    async def next_from(seq):
        asked.append(seq)
        return next((StoredMessage("S", "a", one, b"", 0) for one in sorted(readable) if one >= seq), None)

    coroutine = leader.newest_that_reads(end, next_from)
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    newest = done.value.value
    assert (newest.seq if newest else None) == max(readable, default=None)
    assert len(asked) <= 2 + math.log2(end + 1)
