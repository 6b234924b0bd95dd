"""What the server's answers mean."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.bus.consumer_pull import AckMetadata
from lachesis.pipeline.bus.replies import (
    ApiError,
    error_in,
    has_quorum,
    lacks_leader,
    plain_headers,
    stored_message,
    to_ns,
    to_pub_ack,
)
from lachesis.pipeline.errors import FencedError, InfrastructureError, NotFoundError, StreamFullError
from lachesis.schemas.errors import ConfigError, DataError, LachesisError


@pytest.mark.parametrize(
    ("code", "err_code", "text", "kind", "transient"),
    [
        (503, 10077, "maximum bytes exceeded", StreamFullError, False),
        (503, 10077, "maximum messages exceeded", StreamFullError, False),
        (503, 10077, "maximum messages per subject exceeded", StreamFullError, False),
        (503, 10077, "write /js/blk: no space left on device", StreamFullError, False),
        (500, 10077, "message size exceeds the store's maximum", DataError, False),
        (503, 10077, "stream is starting", InfrastructureError, True),
        (400, 10054, "message size exceeds maximum allowed", DataError, False),
        (503, 10023, "insufficient resources", StreamFullError, False),
        (400, 10071, "wrong last sequence: 5", FencedError, False),
        (400, 10164, "wrong last sequence", InfrastructureError, True),  # another write there is not decided yet
        (409, 10158, "duplicate message id is in process", InfrastructureError, True),
        (400, 10005, "no suitable peers for placement", ConfigError, False),
        (500, 10074, "replicas > 1 not supported in non-clustered mode", ConfigError, False),
        (404, 10037, "no message found", NotFoundError, False),
        (429, 10167, "too many requests", InfrastructureError, True),
        (503, 10008, "JetStream system temporarily unavailable", InfrastructureError, True),
        (400, 10025, "invalid JSON", InfrastructureError, False),
        (503, 10039, "JetStream not enabled for account", InfrastructureError, False),
    ],
)
def test_errors(code: int, err_code: int, text: str, kind: type[LachesisError], transient: bool) -> None:
    data = msgspec.json.encode({"type": "x", "error": {"code": code, "err_code": err_code, "description": text}})
    error = error_in(data)
    assert error == ApiError(code, err_code, text)
    assert type(error.to_exception("subject")) is kind
    assert error.is_transient is transient
    with pytest.raises(kind, match="subject"):
        to_pub_ack(data, "subject")


@given(st.binary(max_size=200))
def test_no_answer_breaks_the_decoders(data: bytes) -> None:
    error_in(data)
    for decode in (lambda: to_pub_ack(data, "x"), lambda: stored_message("S", data, "x")):
        with pytest.raises(InfrastructureError):
            decode()


def test_times() -> None:
    assert to_ns("1970-01-01T00:00:01Z") == 1_000_000_000
    assert to_ns("2026-11-21T12:00:00.123456789Z") % 1_000_000_000 == 123_456_789
    assert to_ns("2026-11-21T12:00:00.5Z") == to_ns("2026-11-21T14:00:00.5+02:00")
    assert to_ns("2026-11-21T12:00:00+00:00") == to_ns("2026-11-21T12:00:00Z")


def test_headers_are_the_publishers() -> None:
    assert plain_headers(None) == {}
    assert plain_headers({"Nats-Sequence": "1", "Nats-Msg-Id": "a", "Lachesis-Plan": "p"}) == {
        "Nats-Msg-Id": "a",
        "Lachesis-Plan": "p",
    }


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.ACK.ROLLOUTS.scorer.3.17.42.1700000000000000000.5",
        "$JS.ACK.domain.account.ROLLOUTS.scorer.3.17.42.1700000000000000000.5",
        "$JS.ACK.domain.account.ROLLOUTS.scorer.3.17.42.1700000000000000000.5.token",
    ],
)
def test_metadata_of_both_forms(reply: str) -> None:
    class Message:
        pass

    message = Message()
    message.reply = reply  # type: ignore[attr-defined]
    assert AckMetadata.of(message) == AckMetadata("scorer", 3, 17, 42, 1_700_000_000_000_000_000, 5)


NOW, LONG_AGO = {"active": 900_000_000}, {"active": 5_000_000_000}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"config": {}}, True),  # no cluster
        ({"cluster": {"leader": "a"}}, True),  # one copy
        ({"cluster": {"leader": "a", "replicas": [NOW, LONG_AGO]}}, True),
        ({"cluster": {"leader": "a", "replicas": [NOW, {**NOW, "offline": True}]}}, True),
        ({"cluster": {"leader": "a", "replicas": [LONG_AGO, LONG_AGO]}}, False),
        ({"cluster": {"leader": "a", "replicas": [NOW, LONG_AGO, LONG_AGO, LONG_AGO]}}, False),
        ({"cluster": {"replicas": [NOW, NOW, NOW]}}, False),
        ({"error": {"code": 503, "err_code": 10008}}, False),
        ({"error": {"code": 404, "err_code": 10059}}, None),
        ({"error": {"code": 500, "err_code": 10000}}, None),
        ({"cluster": 3}, None),
    ],
)
def test_a_leader_that_hears_too_few_copies_leads_nothing(answer, expected):
    assert has_quorum(msgspec.json.encode(answer)) is expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"cluster": {"leader": "", "replicas": [{"name": "two", "offline": True, "active": 10**10}]}}, True),
        ({"cluster": {"leader": "one", "replicas": [{"name": "two", "offline": True, "active": 10**10}]}}, False),
        ({"cluster": {"leader": "one"}}, False),  # one copy
        ({"config": {}}, False),  # no cluster
        ({"error": {"code": 503, "err_code": 10008, "description": "no leader"}}, False),  # an error says so itself
    ],
)
def test_a_copy_without_a_leader_is_told_from_an_answer(answer, expected):
    assert lacks_leader(msgspec.json.encode(answer)) is expected


@pytest.mark.parametrize(
    ("err_code", "mend", "other"),
    [(10026, "raise max_consumers among", "streams of its own"), (10027, "raise max_streams among", "consumers")],
)
def test_a_limit_of_the_account_is_named_with_what_it_limits_alone(err_code: int, mend: str, other: str) -> None:
    error = ApiError(400, err_code, "limit reached").to_exception("x")
    assert isinstance(error, ConfigError)
    assert mend in str(error)
    assert other not in str(error)
