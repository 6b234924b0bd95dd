"""Decodes the server's answers and classifies them: stored, full, fenced, gone, bad, or to be retried.

Pure.

JetStream answers in JSON with an `err_code`; the codes are those of nats-server's `errors.json`.
"""

import base64
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from nats.aio.msg import Msg

from lachesis.pipeline.bus.api import PubAck, StoredMessage
from lachesis.pipeline.bus.routing import MSG_ID_HEADER, SIZE_HEADER
from lachesis.pipeline.errors import (
    FencedError,
    InfrastructureError,
    NotFoundError,
    StreamFullError,
    StreamMissingError,
)
from lachesis.schemas.errors import ConfigError, DataError, LachesisError
from lachesis.schemas.subjects import kind_of

__all__ = [
    "MISSING_HINT",
    "NO_LEADER",
    "STREAM_NOT_FOUND",
    "ApiAnswer",
    "ApiError",
    "ConsumerInfo",
    "ConsumerNames",
    "DeleteAnswer",
    "NameTakenError",
    "PurgeAnswer",
    "RaftGroup",
    "StreamCopy",
    "StreamInfo",
    "StreamList",
    "StreamNames",
    "StreamState",
    "SubjectsOverlapError",
    "decode_answer",
    "direct_message",
    "error_in",
    "has_quorum",
    "lacks_leader",
    "plain_headers",
    "stored_message",
    "to_ns",
    "to_pub_ack",
]

_FULL_ERROR = re.compile(r"maximum (messages|bytes|messages per subject) exceeded|no space left", re.IGNORECASE)
_STORE_FAILED = 10077  # covers a full stream and an oversized message alike: only its text distinguishes them
_TOO_LARGE = 10054
_SUBJECTS_OVERLAP = 10065
_NO_STORAGE = (10023, 10047)
_WRONG_SEQUENCE = 10071
_NAME_TAKEN = 10148
_UNDECIDED = (10158, 10164)  # this very message, or another on its subject, has not reached most servers yet
_TOO_FEW_SERVERS = (10005, 10074)
_ACCOUNT_LIMITS = {
    10026: "raise max_consumers among the jetstream limits of the account, or of the stream if it has one, or leave it "
    "out; every service of a run, and every reader of it, has consumers of its own",
    10027: "raise max_streams among the jetstream limits of the account, or leave it out; every run has streams of its "
    "own",
}
"""Errors of a limit on how many streams or consumers there may be, and how to raise it."""
NO_LEADER = 10008
"""The server's error code for a stream, or a cluster, that has no leader."""
STREAM_NOT_FOUND = 10059
"""The server's error code for a stream that does not exist."""
MISSING_HINT = (
    ": if the run was never started, `lachesis init` or `lachesis up` makes it; else it was deleted, or the server "
    "runs on another store, which `lachesis doctor` names"
)
_SILENT_NS = 4_000_000_000  # copies send a heartbeat every second; 4 s without one begin an election
_NOT_FOUND = 404
_TRANSIENT = (429, 500, 503)
_PERMANENT_ERRORS = (10035, 10036, 10039, 10052)  # in spite of their codes: no account, no JetStream, no such setting


class NameTakenError(InfrastructureError):
    """Raised when a consumer is to be made under a name that another one has."""


class SubjectsOverlapError(InfrastructureError):
    """Raised when a stream is to store subjects that another stream stores."""


class ApiError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""

    @property
    def is_transient(self) -> bool:
        """Whether asking again may help.

        No leader yet, server starting, too many requests, outcome still open.
        """
        again = (self.code in _TRANSIENT and self.err_code not in _PERMANENT_ERRORS) or self.err_code in _UNDECIDED
        return again and type(self.to_exception("")) is InfrastructureError

    def to_exception(self, what: str) -> LachesisError:
        """Return what to raise."""
        text = f"{what}: {self.description} ({self.code}/{self.err_code})"
        if (mend := _ACCOUNT_LIMITS.get(self.err_code)) is not None:
            return ConfigError(f"{text}: {mend}")
        full = self.err_code == _STORE_FAILED and _FULL_ERROR.search(self.description)
        if full or self.err_code in _NO_STORAGE:
            return StreamFullError(text)
        if self.err_code == _TOO_LARGE or (self.err_code == _STORE_FAILED and "size" in self.description):
            return DataError(text)
        if self.err_code == STREAM_NOT_FOUND:
            return StreamMissingError(f"{text}{MISSING_HINT}")
        kind = _BY_CODE.get(self.err_code) or (NotFoundError if self.code == _NOT_FOUND else InfrastructureError)
        return kind(text)


_BY_CODE: Mapping[int, type[LachesisError]] = {
    _WRONG_SEQUENCE: FencedError,
    _SUBJECTS_OVERLAP: SubjectsOverlapError,
    **dict.fromkeys(_TOO_FEW_SERVERS, ConfigError),
    _NAME_TAKEN: NameTakenError,
}


class ApiAnswer(msgspec.Struct, frozen=True):
    """What every JetStream answer may hold."""

    error: ApiError | None = None


class _PubAnswer(ApiAnswer, frozen=True):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False


class _RawMessage(msgspec.Struct, frozen=True):
    subject: str
    seq: int
    time: str
    data: str = ""
    hdrs: str = ""


class _GetAnswer(ApiAnswer, frozen=True):
    message: _RawMessage | None = None


class _LostRange(msgspec.Struct, frozen=True):
    bytes: int = 0


class StreamState(msgspec.Struct, frozen=True):
    """What a stream holds. `lost`: what the server could not read of its store when it started."""

    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    subjects: dict[str, int] | None = None
    lost: _LostRange | None = None
    last_ts: str = ""
    num_deleted: int = 0
    deleted: list[int] | None = None


class StreamCopy(msgspec.Struct, frozen=True):
    """A copy of a stream in a cluster, other than the leader's. `active`: nanoseconds since the leader heard of it."""

    name: str = ""
    current: bool = False
    offline: bool = False
    active: int = 0
    lag: int = 0


class RaftGroup(msgspec.Struct, frozen=True):
    """The servers that hold a stream. `desired`: how many they are to be, while copies are moved."""

    leader: str = ""
    replicas: list[StreamCopy] = []
    desired: Any = None


class StreamInfo(ApiAnswer, frozen=True):
    config: dict[str, Any] = {}
    created: str = ""
    state: StreamState = StreamState(0, 0, 0, 0)
    total: int = 0
    ts: str = ""
    cluster: RaftGroup | None = None


class StreamNames(ApiAnswer, frozen=True):
    streams: list[str] | None = None
    total: int = 0


class StreamList(ApiAnswer, frozen=True):
    streams: list[StreamInfo] | None = None
    total: int = 0


class ConsumerNames(ApiAnswer, frozen=True):
    consumers: list[str] | None = None
    total: int = 0


class DeleteAnswer(ApiAnswer, frozen=True):
    success: bool = False


class PurgeAnswer(ApiAnswer, frozen=True):
    purged: int = 0


class _Sequence(msgspec.Struct, frozen=True):
    stream_seq: int = 0
    consumer_seq: int = 0


class ConsumerInfo(ApiAnswer, frozen=True):
    name: str = ""
    num_pending: int = 0
    num_ack_pending: int = 0
    num_redelivered: int = 0
    ack_floor: _Sequence = _Sequence()
    cluster: RaftGroup | None = None


A = TypeVar("A", bound=ApiAnswer)
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def decode_answer(kind: type[A], data: bytes, what: str) -> A:
    """Return the answer in `data`.

    Raises what its error means, and `InfrastructureError` for no JSON at all.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        answer: A = decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise InfrastructureError(f"{what}: not an answer of JetStream: {error}") from error
    if answer.error is not None:
        raise answer.error.to_exception(what)
    return answer


def error_in(data: bytes) -> ApiError | None:
    """Return the error in an answer, if it holds one."""
    if b'"error"' not in data:
        return None
    try:
        return msgspec.json.decode(data, type=ApiAnswer).error
    except msgspec.MsgspecError:
        return None


class _Leader(msgspec.Struct, frozen=True):
    cluster: RaftGroup | None = None


def lacks_leader(data: bytes) -> bool:
    """Return whether an answer of `STREAM.INFO` is that of a copy without a leader.

    It may be behind, and is no error. A server that has lost the others of its cluster answers so after some seconds.
    """
    try:
        group = msgspec.json.decode(data, type=_Leader).cluster
    except msgspec.MsgspecError:
        return False
    return group is not None and bool(group.replicas) and not group.leader


def has_quorum(data: bytes) -> bool | None:
    """Whether a stream can store and read, by the answer of `STREAM.INFO`; None: the answer does not say.

    A leader that is cut off from its cluster takes itself for the leader for 20 s more. It says how long ago it heard
    of each copy.
    """
    error = error_in(data)
    if error is not None:
        return False if error.err_code == NO_LEADER else None
    try:
        group = msgspec.json.decode(data, type=_Leader).cluster
    except msgspec.MsgspecError:
        return None
    if group is None:
        return True  # a server that is part of no cluster
    heard = [copy for copy in group.replicas if not copy.offline and copy.active <= _SILENT_NS]
    return bool(group.leader) and 2 * (1 + len(heard)) > 1 + len(group.replicas)


def to_pub_ack(data: bytes, what: str) -> PubAck:
    """Return the acknowledgement of a stored message; raises as `decode_answer`."""
    answer = decode_answer(_PubAnswer, data, what)
    if not answer.seq:
        raise InfrastructureError(f"{what}: acknowledged without a sequence")
    return PubAck(kind_of(answer.stream), answer.seq, answer.duplicate)


def stored_message(stream: str, data: bytes, what: str) -> StoredMessage:
    """Return the message in an answer of `STREAM.MSG.GET`."""
    raw = decode_answer(_GetAnswer, data, what).message
    if raw is None:
        raise InfrastructureError(f"{what}: an answer without a message")
    headers = {}
    for line in base64.b64decode(raw.hdrs).decode("utf-8", "replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    data = base64.b64decode(raw.data)
    return StoredMessage(kind_of(stream), raw.subject, raw.seq, data, to_ns(raw.time), plain_headers(headers))


def direct_message(stream: str, msg: Msg | None) -> StoredMessage | None:
    """Return the message in an answer to a direct get, None if it holds none."""
    headers = msg.headers if msg is not None else None
    if msg is None or not headers or "Nats-Sequence" not in headers or "Status" in headers:
        return None
    return StoredMessage(
        kind_of(stream),
        headers["Nats-Subject"],
        int(headers["Nats-Sequence"]),
        msg.data,
        to_ns(headers["Nats-Time-Stamp"]),
        plain_headers(headers),
    )


def plain_headers(headers: dict[str, str] | None) -> dict[str, str]:
    """Return the headers as published.

    Without the server's own, which begin with `Nats-`, but the message id, and the size where the data was left out.
    """
    if not headers:
        return {}
    return {k: v for k, v in headers.items() if not k.startswith("Nats-") or k in (MSG_ID_HEADER, SIZE_HEADER)}


def to_ns(text: str) -> int:
    """Return an RFC 3339 time with up to nine decimals as Unix time, ns."""
    whole, _, rest = text.partition(".")
    fraction = re.match(r"\d*", rest)
    digits = fraction.group() if fraction else ""
    zone = rest[len(digits) :] if rest else whole[19:]
    moment = datetime.fromisoformat(whole[:19] + (zone.replace("Z", "+00:00") or "+00:00"))
    return int(moment.astimezone(UTC).timestamp()) * 1_000_000_000 + int(digits[:9].ljust(9, "0") or 0)
