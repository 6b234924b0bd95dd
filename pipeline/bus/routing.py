"""Subject routing: the stream of a subject, whether a filter covers it, and the headers. Pure."""

import functools
import re

from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import BLOB_KINDS, STREAMS, blob, run_of, stream_name

__all__ = [
    "BROKEN_HEADER",
    "LARGE_HEADER",
    "MSG_ID_HEADER",
    "SIZE_HEADER",
    "check_key",
    "chunks_subject",
    "matches",
    "names_chunks",
    "stored_in",
    "stream_in_api",
    "stream_of",
]

MSG_ID_HEADER = "Nats-Msg-Id"
SIZE_HEADER = "Nats-Msg-Size"
"""What the server says of a message whose data it leaves out: how many bytes that has."""
LARGE_HEADER = "Lachesis-Large"
"""Marks the head of a message stored in chunks; its value names their subject."""

_CHUNKS = re.compile(r"[0-9a-f]{32}")
_KEY = re.compile(r"[A-Za-z0-9_=/-]+(\.[A-Za-z0-9_=/-]+)*")


BROKEN_HEADER = "Lachesis-Broken"
"""Says why a large message could not be put together; its data is then the head's, which is no event."""


def matches(pattern: str, subject: str) -> bool:
    """Return whether `subject` is covered by `pattern`.

    `*` stands for one token, a final `>` for one or more.
    """
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        if len(tokens) < len(wanted):
            return False
        wanted = wanted[:-1]
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


@functools.lru_cache(maxsize=4096)
def stream_of(subject: str) -> str:
    """Return the kind of stream that stores `subject`. Raises `ConfigError` where none does."""
    for stream, patterns in STREAMS.items():
        if any(matches(pattern, subject) for pattern in patterns):
            return stream
    raise ConfigError(f"subject {subject[:120]!r} belongs to no stream; build subjects with lachesis.schemas.subjects")


@functools.lru_cache(maxsize=4096)
def stored_in(subject: str) -> str:
    """Return the server's name of the stream that stores `subject`. Raises `ConfigError` where none does."""
    kind = stream_of(subject)
    return stream_name(run_of(subject), kind)


def stream_in_api(subject: str) -> str:
    """Return the stream that a request to JetStream's API is about, empty where it is about none."""
    tokens = subject.split(".")[2:]  # after $JS.API; of "MSG.GET", "MSG.NEXT" and "LEADER.STEPDOWN" both are the verb
    place = 3 if tokens[1:2] in (["MSG"], ["LEADER"]) else 2
    return tokens[place] if len(tokens) > place else ""


def chunks_subject(subject: str, name: str = "*") -> str:
    """Return where the chunks of a large message on `subject` go, in the same stream.

    Raises `ConfigError` where a message cannot be large.
    """
    tokens = subject.split(".")
    if len(tokens) < 3 or tokens[1] not in BLOB_KINDS:
        raise ConfigError(f"subject {subject[:120]!r}: only {' and '.join(BLOB_KINDS)} may be large")
    return blob(tokens[1], tokens[2], tokens[-1], name)


def names_chunks(subject: str, header: str) -> bool:
    """Whether `header`, of a head on `subject`, names chunks that can be its own and no more than those."""
    name = header.rpartition(".")[2]
    if subject.split(".")[1] not in BLOB_KINDS or not _CHUNKS.fullmatch(name):
        return False
    return header == chunks_subject(subject, name)


def check_key(key: str) -> None:
    """Raise `ConfigError` unless `key` can be part of a subject."""
    if not _KEY.fullmatch(key):
        raise ConfigError(f"key {key[:80]!r}: use letters, digits, '-', '_', '/', '=' and single dots between them")
