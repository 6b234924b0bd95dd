"""What a group's records make of it: the path of each session, and nothing of a life that was replaced."""

import pytest
from fuzz.examples import GROUP

from lachesis.pipeline.calls.recorded import fold_records
from lachesis.schemas.calls import GroupEnd, GroupStart, SessionCall, StoredRecord, ToolResults
from lachesis.schemas.codec import encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.errors import SchemaError


def start(life=1, fruitless=0, known_seq=0):
    return GroupStart(
        run="r", env="e", group=GROUP, life=life, holder="h", producer="p", epoch=1, counter=0, item="7", samples=2,
        tokenizer_hash="t", started_ns=1, fruitless=fruitless, known_seq=known_seq,
    )  # fmt: skip


def call(index, parent, *, life=1, text="a", fork=""):
    return SessionCall(
        group=GROUP, life=life, session="0.0", index=index, parent=parent, digest=b"12345678",
        prompt=as_bytes([1], "int32"), tokens=as_bytes([3], "int32"), logprobs=as_bytes([-0.5], "float32"),
        versions=[(0, "0-a-b")], finish_reason="stop", text=text, fork=fork, seconds=0.5,
    )  # fmt: skip


def fold(*events):
    kinds = {GroupStart: "start", SessionCall: "call", ToolResults: "tools", GroupEnd: "end"}
    return fold_records(
        StoredRecord(seq=seq, kind=kinds[type(event)], data=encode(event)) for seq, event in enumerate(events, 1)
    )


def test_a_sessions_calls_are_those_of_the_path_to_its_newest() -> None:
    group = fold(start(), call(0, None), call(1, 0), call(2, 0), call(3, 2))
    assert [one.index for one in group.sessions["0.0"].branch("")] == [0, 2, 3]
    assert [one.index for one in group.sessions["0.0"].path(1)] == [0, 1]
    assert (group.seconds, group.n_calls, group.since_start) == (2.0, 4, 4)


def test_a_branchs_calls_are_its_own_up_to_its_newest() -> None:
    session = fold(
        start(), call(0, None), call(1, 0, fork="0"), call(2, 0, fork="1"), call(3, 0), call(4, 1, fork="0"),
        call(5, 1, fork="0"), call(6, 5, fork="0.1"),
    ).sessions["0.0"]  # fmt: skip
    found = {fork: [one.index for one in session.branch(fork)] for fork in ("", "0", "1", "0.1", "0.0")}
    assert found == {"": [0, 3], "0": [1, 5], "1": [2], "0.1": [6], "0.0": []}


def test_records_of_a_life_that_was_replaced_are_passed_over() -> None:
    group = fold(start(), call(0, None), start(life=2), call(1, 0, life=1, text="late"), call(1, 0, life=2, text="new"))
    assert [one.text for one in group.sessions["0.0"].branch("")] == ["a", "new"]
    assert group.start.life == 2
    assert group.since_start == 1


def test_what_a_replaced_process_wrote_after_its_records_were_read_is_no_part_of_the_group() -> None:
    group = fold(
        start(), call(0, None), call(1, 0, text="nobody got it"), call(2, 1, text="nor this"),
        start(life=2, known_seq=2), call(1, 0, life=2, text="new"),
    )  # fmt: skip
    assert [(one.index, one.text) for one in group.sessions["0.0"].calls.values()] == [(0, "a"), (1, "new")]
    assert (group.last_seq, group.since_start) == (6, 1)


def test_behind_a_call_that_is_missing_nothing_goes_on() -> None:
    group = fold(start(), call(0, None), call(2, 1))
    assert group.sessions["0.0"].branch("") == []


def test_a_group_at_its_end_is_none() -> None:
    assert fold(start(), call(0, None), GroupEnd(group=GROUP, life=1, outcome="stored")) is None


def test_a_late_end_of_a_life_that_was_replaced_does_not_end_it() -> None:
    assert fold(start(), start(life=2), GroupEnd(group=GROUP, life=1, outcome="abandoned")) is not None


def test_records_without_a_start_or_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(SchemaError, match="no start"):
        fold(call(0, None))
    with pytest.raises(SchemaError, match="SessionCall"):
        fold_records(
            [StoredRecord(seq=1, kind="start", data=encode(start())), StoredRecord(seq=2, kind="call", data=b"x")]
        )
