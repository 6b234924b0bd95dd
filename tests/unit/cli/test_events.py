import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit, GroupScore, RewardEvent, ScoreEvent, Stamp, TeacherLogprobs
from lachesis.schemas.catalog import CHANNELS, channel_of
from lachesis.schemas.codec import Event, encode
from lachesis.schemas.columns import Column, as_bytes
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.replay import RescoreEvent
from lachesis.services.cli.events import FieldFilter, json_line, plain_values, text_line, to_plain

SCORES = ScoreEvent(
    run="r", env="words", revision="live", ensemble="e", raters={},
    groups=[
        GroupScore(group=new_group_id(), seq=7, item="3", policy_step=0, scores=[0.5, None], ratings={}, lengths=[1, 2],
                   stamps=[Stamp("scorer", 1, 2, 3)]),
        GroupScore(group=new_group_id(), seq=8, item="4", policy_step=0, scores=[1.0], ratings={"a.b": [1.0]},
                   lengths=[1]),
    ],
)  # fmt: skip


def stored(subject: str, event: Event | bytes) -> StoredMessage:
    data = event if isinstance(event, bytes) else encode(event)
    return StoredMessage("EVENTS", subject, 5, data, 1_000_000_000)


def shown(message: StoredMessage, *, full: bool = False) -> dict[str, Any]:
    channel = channel_of(message.subject)
    assert channel is not None
    return to_plain(message, channel, full=full)


SCORE_MESSAGE = stored(subjects.event("score", "r", "live", "words"), SCORES)


def test_array_like_structs_are_shown_with_their_names() -> None:
    assert shown(SCORE_MESSAGE)["groups"][0]["stamps"] == [
        {"stage": "scorer", "stored_ns": 1, "start_ns": 2, "end_ns": 3, "attempt": 1}
    ]


def test_columns_are_summarised_or_shown_in_full() -> None:
    event = TeacherLogprobs(
        run="r", env="e", group="g", teacher="t", tokenizer_hash="h", temperature=1.0,
        logprobs=as_bytes([-0.5, -1.5], "float32"),
    )  # fmt: skip
    message = stored(subjects.logprobs("r", "live", "e"), event)
    assert shown(message)["logprobs"] == {"dtype": "float32", "len": 2}
    assert shown(message, full=True)["logprobs"] == [-0.5, -1.5]
    column = Column(dtype="int16", data=as_bytes([1, 2, 3, 4], "int16"), width=2)
    assert plain_values(column, full=False)["data"] == {"dtype": "int16", "len": 4}
    assert plain_values(column, full=True)["data"] == [1, 2, 3, 4]


def test_a_delta_is_decoded_in_full_and_survives_being_no_msgpack() -> None:
    good = Commit(term="t", index=0, cursors={}, delta=msgspec.msgpack.encode({"n": 1}), crc32=0)
    assert plain_values(good, full=True)["delta"] == {"n": 1}
    assert plain_values(Commit(term="t", index=0, cursors={}, delta=b"\xc1", crc32=0), full=True)["delta"] == "wQ=="


def test_replayed_annotations_are_told_apart() -> None:
    commit = Commit(term="t", index=0, cursors={}, delta=b"\x80", crc32=0)
    event = RescoreEvent(
        run="r", env="words", revision="v2", ensemble="e", raters={}, advantage="grpo", commit=commit, digest="d",
        scores=SCORES.groups, rewards=[],
    )  # fmt: skip
    assert shown(stored(subjects.replay("rescore", "r", "v2", "words"), event))["digest"] == "d"


@given(st.binary(max_size=200), st.sampled_from([channel.name for channel in CHANNELS]), st.booleans())
def test_no_bytes_whatsoever_end_a_tail(data: bytes, name: str, full: bool) -> None:
    channel = next(channel for channel in CHANNELS if channel.name == name)
    message = stored(channel.pattern.replace("*", "x"), data)
    event = to_plain(message, channel, full=full)
    assert json.loads(json_line(message, event))["event"] == json.loads(msgspec.json.encode(event))
    assert "\n" not in text_line(message, event)


def test_stamps_and_digests_are_shown_in_full_lines_alone() -> None:
    event = shown(SCORE_MESSAGE)
    assert "stamps" not in text_line(SCORE_MESSAGE, event)
    assert "item=3" in text_line(SCORE_MESSAGE, event)
    assert "stamps=[{stage=scorer" in text_line(SCORE_MESSAGE, event, full=True)


def test_hostile_text_does_not_reach_the_terminal() -> None:
    hostile = SCORES.replace(ensemble="a\x1b[2J\nb\u202e", raters={"r\x1b[2J": "1"})
    message = stored(subjects.event("score", "r", "live", "words"), hostile)
    line = text_line(message, shown(message))
    assert "ensemble=a\\x1b[2J\\nb\\u202e" in line
    assert "r\\x1b[2J=1" in line
    assert line.isprintable()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ensemble=e", True),
        ("ensemble=f", False),
        ("groups.item=4", True),
        ("groups.item=5", False),
        ("groups.scores=0.5", True),
        ("groups.scores=null", True),
        ("groups.ratings.a.b=1.0", True),
        ("seq=5", True),
        ("seq=6", False),
        ("groups.nothing=1", False),
        ("run=r", True),
    ],
)
def test_where(text: str, expected: bool) -> None:
    channel = channel_of(SCORE_MESSAGE.subject)
    assert channel is not None
    assert FieldFilter.parse(text, [channel]).matches(SCORE_MESSAGE, shown(SCORE_MESSAGE)) is expected


@pytest.mark.parametrize(
    ("text", "hint"), [("ensemble", "field=value"), ("=x", "field=value"), ("ensembel=e", "ensem")]
)
def test_a_wrong_filter_is_refused(text: str, hint: str) -> None:
    channel = channel_of(SCORE_MESSAGE.subject)
    assert channel is not None
    with pytest.raises(ConfigError, match=hint):
        FieldFilter.parse(text, [channel])


def test_a_field_of_any_channel_may_be_filtered() -> None:
    channels = [channel for channel in CHANNELS if RewardEvent in channel.events or ScoreEvent in channel.events]
    assert FieldFilter.parse("advantage=grpo", channels).value == "grpo"


def test_not_a_number_is_still_json() -> None:
    column = Column(dtype="float32", data=as_bytes(np.array([np.nan, -np.inf]), "float32"))
    event = {"column": plain_values(column, full=True)}
    assert json.loads(json_line(SCORE_MESSAGE, event))["event"]["column"]["data"] == [None, None]
