"""Subjects, filters and keys."""

import pytest

from lachesis.pipeline.bus.routing import check_key, matches, stream_in_api, stream_of
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("*.b", "a.b", True),
        ("a.b", "a.bc", False),
    ],
)
def test_matches(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


def test_every_subject_has_its_stream() -> None:
    group = "0" * 32
    assert stream_of(subjects.rollout("r", "e")) == subjects.ROLLOUTS
    assert stream_of(subjects.blob("rollout", "run", "math", group)) == subjects.ROLLOUTS
    assert stream_of(subjects.event("score", "r", "live", "e")) == subjects.EVENTS
    assert stream_of(subjects.logprobs("r", "live", "e")) == subjects.TEACHER
    assert stream_of(subjects.ledger("r", "t")) == subjects.LEDGER
    assert stream_of(subjects.state("r", "s", "live", "p")) == subjects.LEDGER
    for wrong in ("", "rl", subjects.lease("r"), "rl.rollout.r", "rl.rollout.r.e.x"):
        with pytest.raises(ConfigError):
            stream_of(wrong)


def test_no_subject_belongs_to_two_streams() -> None:
    everything = [(name, pattern) for name, patterns in subjects.STREAMS.items() for pattern in patterns]
    for name, pattern in everything:
        concrete = pattern.replace("*", "x")
        assert [other for other, p in everything if matches(p, concrete)] == [name]


def test_keys() -> None:
    for good in ("run", "run.env", "a_b-c/d=e"):
        check_key(good)
    for bad in ("", ".", "a.", ".a", "a b", "a\r\nb", "*", ">", "ü"):
        with pytest.raises(ConfigError):
            check_key(bad)


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        ("INFO", ""),
        ("STREAM.INFO.LEDGER", "LEDGER"),
        ("STREAM.MSG.GET.LEDGER", "LEDGER"),
        ("STREAM.LEADER.STEPDOWN.LEDGER", "LEDGER"),
        ("STREAM.PURGE.LEDGER", "LEDGER"),
        ("DIRECT.GET.LEDGER", "LEDGER"),
        ("CONSUMER.CREATE.LEDGER.read-1", "LEDGER"),
        ("CONSUMER.INFO.LEDGER.scorer", "LEDGER"),
        ("CONSUMER.MSG.NEXT.LEDGER.scorer", "LEDGER"),
    ],
)
def test_the_stream_that_a_request_is_about(subject: str, expected: str) -> None:
    assert stream_in_api(f"$JS.API.{subject}") == expected
