from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.schemas import (
    alerts,
    annotations,
    calls,
    columns,
    control,
    ledger,
    promotion,
    replay,
    retention,
    rollout,
    store_marks,
    subjects,
    weights,
)
from lachesis.schemas.catalog import BINARY, CHANNELS, KEY_EVENTS, channel_of, narrow
from lachesis.schemas.codec import Event

READ_AS = rollout.PackedGroup
"""A way to read a rollout group, which is no event of its own."""


def test_the_catalog_covers_every_stream_exactly() -> None:
    by_stream: dict[str, set[str]] = {}
    for channel in CHANNELS:
        if channel.stream is not None:
            by_stream.setdefault(channel.stream, set()).add(channel.pattern)
    assert by_stream == {stream: set(patterns) for stream, patterns in subjects.STREAMS.items()}


def test_every_event_is_in_the_catalog() -> None:
    listed = {event for channel in CHANNELS for event in (*channel.events, channel.reply)}
    listed |= {event for events in KEY_EVENTS.values() for event in events}
    modules = (alerts, annotations, calls, control, ledger, promotion, replay, retention, rollout, store_marks, weights)
    public = {getattr(module, name) for module in modules for name in module.__all__}
    events = {kind for kind in public if isinstance(kind, type) and issubclass(kind, Event)}
    assert events - {READ_AS} == listed - {None}
    assert set(get_args(subjects.Kind)) <= {channel.name for channel in CHANNELS}


def test_every_binary_field_is_described() -> None:
    modules = (alerts, annotations, calls, columns, control, ledger, rollout, weights)
    found: dict[str, set[str]] = {}
    for kind in {getattr(module, name) for module in modules for name in module.__all__}:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not READ_AS:
            binary = {f.name for f in msgspec.structs.fields(kind) if f.type in (bytes, bytes | None)}
            if binary:
                found[kind.__name__] = binary
    assert found == {name: set(fields) for name, fields in BINARY.items()}


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        (subjects.rollout("r", "words"), "rollout"),
        (subjects.event("score", "r", "live", "words"), "score"),
        (subjects.state("r", "trainer", "live", "main"), "state"),
        (subjects.heartbeat("r", "scorer", "1-ab"), "heartbeat"),
        ("rl.replay.rescore.r.v2.words", "replay"),
        ("rl.score.r.live", None),
        ("rl.score.r.live.words.more", None),
        ("other", None),
    ],
)
def test_a_subject_finds_its_channel(subject: str, name: str | None) -> None:
    channel = channel_of(subject)
    assert (channel and channel.name) == name


@pytest.mark.parametrize(
    ("wanted", "pattern", "expected"),
    [
        (">", "rl.ledger.*.*", "rl.ledger.*.*"),
        ("rl.score.>", "rl.score.*.*.*", "rl.score.*.*.*"),
        ("rl.score.demo.>", "rl.score.*.*.*", "rl.score.demo.*.*"),
        ("rl.*.demo.live.words", "rl.score.*.*.*", "rl.score.demo.live.words"),
        ("rl.score.demo", "rl.score.*.*.*", None),
        ("rl.score.a.b.c.>", "rl.score.*.*.*", None),
        ("rl.reward.>", "rl.score.*.*.*", None),
    ],
)
def test_narrow_gives_what_both_match(wanted: str, pattern: str, expected: str | None) -> None:
    assert narrow(wanted, pattern) == expected


def _matches(pattern: list[str], subject: list[str]) -> bool:
    """NATS matching, written another way: token by token, recursively."""
    if pattern == [">"]:
        return bool(subject)
    if not pattern or not subject:
        return not pattern and not subject
    return pattern[0] in ("*", subject[0]) and _matches(pattern[1:], subject[1:])


_token = st.sampled_from(["a", "b", "*"])


@given(
    wanted=st.lists(_token, max_size=4),
    tail=st.booleans(),
    pattern=st.lists(_token, min_size=1, max_size=4),
    subject=st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=5),
)
def test_narrow_is_the_intersection(wanted: list[str], tail: bool, pattern: list[str], subject: list[str]) -> None:
    wanted = [*wanted, ">"] if tail or not wanted else wanted
    narrowed = narrow(".".join(wanted), ".".join(pattern))
    both = _matches(wanted, subject) and _matches(pattern, subject)
    assert both == (narrowed is not None and _matches(narrowed.split("."), subject))
