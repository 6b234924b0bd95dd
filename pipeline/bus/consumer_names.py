"""Names and describes consumers, so that their list shows the owner of each and what it reads.

Pure.
"""

import re
from collections.abc import Sequence

__all__ = ["durable_description", "reader_description", "reader_name", "reader_names"]

_READERS = {"scorer": 128, "trainer": 128}
_READERS_OF_OTHERS = 32
"""Readers that all processes of one identity may have on one stream; some identities have many processes. A process has
up to five, and may leave as many behind when it is killed, which the server forgets after half a minute."""
_MAX_NAME = 200
_MAX_DESCRIPTION = 1000
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_=-]+")


def reader_name(client: str, stream: str, filters: Sequence[str], suffix: str) -> str:
    """Return the name of a reader's consumer.

    Service, run, stream, kinds of messages, and a suffix that is its own.

    `client` is the connection's name, `<run>.<service>`. None of the parts holds a `=`, so that a durable consumer,
    which has two of them, never has this name.
    """
    run, _, service = client.partition(".")
    kinds = "-".join(dict.fromkeys(map(_kind, filters))) or "all"
    parts = (service or "client", run or "unnamed", stream, kinds)
    return f"{'='.join(_FORBIDDEN.sub('-', part) for part in parts)[:_MAX_NAME]}={suffix}"


def reader_names(identity: str) -> list[str]:
    """Return the consumer names of an identity, if the server permits each identity only its own names.

    They have one `=` where those of durable consumers have two and those of other readers four.
    """
    return [f"{identity}={number}" for number in range(_READERS.get(identity, _READERS_OF_OTHERS))]


def reader_description(client: str, filters: Sequence[str], start: int, suffix: str) -> str:
    """Return what a reader's consumer is for.

    `suffix` is its own, so that the server takes no two for the same.
    """
    text = f"Lachesis: {client or 'a client'} reads {', '.join(filters) or 'all'} from {start} on"
    return f"{text[: _MAX_DESCRIPTION - len(suffix) - 1]} {suffix}"


def durable_description(durable: str) -> str:
    """Return what a competing consumer is for."""
    stage, *rest = durable.split("=")
    of = ", ".join(f"{what} {name}" for what, name in zip(("run", "revision"), rest, strict=False))
    return f"Lachesis: work of all replicas of {stage}{f' ({of})' if of else ''}"


def _kind(subject: str) -> str:
    """Return what kind of messages a filter selects: its second part, of a bucket's the key's first part."""
    parts = subject.split(".")
    return parts[2] if parts[0] == "$KV" and len(parts) > 2 else parts[1] if len(parts) > 1 else subject
