"""Server permissions of each identity: subjects that it may publish and subscribe to. Pure.

Consumers are made under names that belong to one identity, which has a few for each stream. So no identity can take
messages from another's consumer, or use up the consumers that a stream may have.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from lachesis.pipeline.access import Access
from lachesis.pipeline.bus.consumer_names import reader_names
from lachesis.pipeline.bus.domains import in_domain
from lachesis.schemas.subjects import BUCKET, key_change, stream_name, value_subject

__all__ = ["ANSWERS", "API", "Permissions", "identity_in", "inbox_prefix", "permissions"]

API = "$JS.API"
_INBOX = "_INBOX_"
ANSWERS = "_R_.>"
"""Where the server expects answers to requests of other accounts. It makes these subjects; no client can name one."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects as nats-server takes them; whatever is not allowed is refused, and denied goes before allowed."""

    publish: list[str]
    deny_publish: list[str]
    subscribe: list[str]

    def in_domain(self, domain: str | None) -> Self:
        """Return the same for streams in a JetStream domain at the other end of a leaf node."""
        publish, deny = ([in_domain(one, domain) for one in given] for given in (self.publish, self.deny_publish))
        return type(self)(publish, deny, self.subscribe)


def inbox_prefix(identity: str) -> str:
    """Return the prefix of the subjects on which answers come back to an identity, and to no other."""
    return f"{_INBOX}{identity}"


def identity_in(prefix: str) -> str | None:
    """Return the identity that has this prefix; None if the server does not distinguish identities."""
    return prefix.removeprefix(_INBOX) if prefix.startswith(_INBOX) and prefix != _INBOX else None


def permissions(run: str, identity: str, access: Access) -> Permissions:
    """Return what the server is to allow `identity` in `run`."""

    def api(kinds: Iterable[str], *verbs: str) -> list[str]:
        return [f"{API}.{verb}.{stream_name(run, kind)}" for kind in kinds for verb in verbs]

    publish = [f"{API}.INFO", *access.writes, *access.tells, *(subject for _, subject in access.asks)]
    publish += [value_subject(run, key) for key in access.sets]
    if access.serves:
        publish.append(ANSWERS)
    if any(other == identity for other, _ in access.asks):
        publish.append(f"{inbox_prefix(identity)}.>")
    publish += api(access.measures, "STREAM.INFO")
    for kind in access.gets:
        publish += api([kind], "STREAM.MSG.GET", *(() if kind == BUCKET else ("DIRECT.GET",)))
    publish += [f"{API}.DIRECT.GET.{stream_name(run, kind)}.{subject}" for kind, subject in access.rereads]
    publish += [f"{API}.CONSUMER.{verb}.{stream_name(run, kind)}.{name}" for kind in access.reads
                for name in reader_names(identity) for verb in ("CREATE", "MSG.NEXT")]  # fmt: skip
    for kind, durable in access.consumes:
        stream = stream_name(run, kind)
        publish += [f"{API}.CONSUMER.{verb}.{stream}.{durable}" for verb in ("CREATE", "MSG.NEXT")]
        # newer servers may put a domain and an account before the stream
        publish += [f"$JS.ACK.{stream}.{durable}.>", f"$JS.ACK.*.*.{stream}.{durable}.>"]
    publish += [f"{API}.CONSUMER.INFO.{stream_name(run, kind)}.{durable}" for kind, durable in access.inspects]
    publish += api(access.trims, "STREAM.PURGE")
    if access.lists:
        publish += [f"{API}.STREAM.NAMES", f"{API}.STREAM.LIST"]
    publish += api(access.lists, "CONSUMER.NAMES")
    publish += [f"{subject}.*" for subject in api(access.forgets, "CONSUMER.DELETE", "CONSUMER.RESET")]
    publish += api(access.makes, "STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.LEADER.STEPDOWN")
    changes = [key_change(run, key) for key in access.watches]
    return Permissions(
        list(dict.fromkeys(publish)),
        list(access.spares),
        [*access.hears, *access.serves, *changes, f"{inbox_prefix(identity)}.>"],
    )
