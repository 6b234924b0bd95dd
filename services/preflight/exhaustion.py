"""Checks what one identity can use up for the others: readers of a stream, and the room in it.

`lachesis doctor` shows these findings and `lachesis status` warns of them, so that both name the identity and the way
out. Reads the names of a stream's consumers, and the newest messages of a stream that is nearly full.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import anyio

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.bus.consumer_names import reader_names
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.routing import SIZE_HEADER, matches
from lachesis.pipeline.common.doctor_finding import DoctorFinding, warn
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, NotFoundError
from lachesis.pipeline.extension import access_of
from lachesis.schemas import subjects
from lachesis.schemas.subjects import BUCKET, CALLS, LEDGER, WEIGHTS
from lachesis.services.output import human_bytes
from lachesis.services.run.permission_scope import scope_of

__all__ = ["check_readers", "check_room", "find_exhaustion", "is_closed", "writers_of"]

MANY_CONSUMERS = 500
_MANY_READERS = 0.75
"""Share of the readers that an identity may have from which on it is named."""
_NEWEST_MESSAGES = 4096
"""How many of a stream's messages are looked at for who filled it, without their data: a fraction of a second."""
_MAX_READ_S = 1.0
"""Longest time that this takes: the caller's own readers may be used up, too."""
_MAX_NAMED = 3
_NEW_KEY = "delete its seed (auth/RUN/IDENTITY.nk), run `lachesis auth init` and reload the server"
_FREE_READERS = (
    "`lachesis gc --consumers --yes` deletes them, and those in use are made again; if they come back, end the "
    f"processes that have its key and give it a new one: {_NEW_KEY}"
)
_GOVERNOR = "governor"


async def find_exhaustion(bus: NatsBus, config: RunConfig, kinds: Iterable[str]) -> list[DoctorFinding]:
    """Return who uses up what in these of the run's streams. Raises `InfrastructureError`."""
    found: list[DoctorFinding] = []
    for kind in kinds:
        with suppress(NotFoundError):  # it is not made yet
            found += check_readers(subjects.stream_name(config.run, kind), await bus.consumer_names(kind))
            usage = await bus.usage(kind)
            if is_closed(config, kind, usage):
                by_writer = await (
                    _keys_by_writer(bus, config) if kind == BUCKET else _bytes_by_writer(bus, config, kind, usage)
                )
                found.append(check_room(config, kind, usage, by_writer))
    return found


def is_closed(config: RunConfig, kind: str, usage: StreamUsage) -> bool:
    """Return whether a stream is so full that no leases are granted. Old weights make room by themselves."""
    return kind != WEIGHTS and usage.bytes >= config.flow.close_at * usage.max_bytes > 0


def check_readers(stream: str, consumers: Sequence[str]) -> Iterator[DoctorFinding]:
    """Yield a finding for each identity that has nearly used up its readers.

    One more where a stream has very many consumers in all.
    """
    owners = Counter(name.partition("=")[0] for name in consumers)
    named = Counter(name.partition("=")[0] for name in consumers if name.count("=") == 1)
    for owner, count in sorted(named.items()):
        most = len(reader_names(owner))
        if count >= _MANY_READERS * most:
            text = f"{owner} has {count} of the {most} readers that it may have"
            if count >= most:
                text += ", so that none of its processes can start to read"
            yield warn(f"consumers of {stream}", text, _FREE_READERS)
    if len(consumers) >= MANY_CONSUMERS:
        shown = ", ".join(f"{owner[:40]} {count}" for owner, count in owners.most_common(_MAX_NAMED))
        text = f"{len(consumers)} ({shown}); a run has some dozens, and the server refuses more than about a thousand"
        yield warn(f"consumers of {stream}", text, _FREE_READERS)


def check_room(config: RunConfig, kind: str, usage: StreamUsage, by_writer: Mapping[str, int]) -> DoctorFinding:
    """Return the finding on a stream that is nearly full.

    `by_writer`: bytes of its newest messages, or the number of the bucket's keys, by writer.
    """
    text = f"{100 * usage.bytes / usage.max_bytes:.0f} % of {human_bytes(usage.max_bytes)} taken"
    text += "" if kind == BUCKET else "; no new leases are granted"
    largest = sorted(by_writer.items(), key=lambda one: -one[1])[:_MAX_NAMED]
    if largest:
        total = sum(by_writer.values())
        shares = ", ".join(f"{who} ({100 * part / total:.0f} %)" for who, part in largest)
        text += f"; its {'keys' if kind == BUCKET else 'newest messages'} are of {shares}"
    return warn(f"stream {subjects.stream_name(config.run, kind)}", text, _room_mend(kind))


def _room_mend(kind: str) -> str:
    if kind == BUCKET:
        return (
            "`lachesis gc --attempts --yes` deletes records of failed deliveries, which scorer and teacher can write "
            f"without end; raise streams.bucket_bytes; an identity that writes more than it should: {_NEW_KEY}"
        )
    if kind == CALLS:
        return (
            "the governor deletes calls once their group is stored, and gives up what killed processes left behind; "
            "raise streams.calls_bytes and run lachesis init, lower environments.*.concurrency, or set "
            'environments.NAME.record = "never"'
        )
    trim = "`lachesis gc --keep-bytes SIZE --yes` deletes what is not needed" + (
        " (the ledger with --ledger)" if kind == LEDGER else ""
    )
    return (
        f"let the governor trim it; {trim}; or raise streams.{kind.lower()}_bytes and run lachesis init. "
        f"An identity that writes more than it should: {_NEW_KEY}"
    )


def writers_of(config: RunConfig, subject: str) -> str:
    """Return who may store messages on `subject` in the course of a run, as text."""
    run, found = config.run, []
    for identity, access in access_of(scope_of(config)).items():
        stored = (*access.writes, *(subjects.value_subject(run, key) for key in access.sets))
        if identity != OPERATOR and any(matches(pattern, subject) for pattern in stored):
            found.append(identity)
    if len(found) > 1 and subject.startswith("rl.blob."):
        found.remove(_GOVERNOR)  # it ends the chunks of others
    return " or ".join(found) or OPERATOR


async def _keys_by_writer(bus: NatsBus, config: RunConfig) -> dict[str, int]:
    """Return how many keys of the bucket each may have written. A key holds a few bytes, unless somebody misuses it."""
    stored = await bus.stored_subjects(BUCKET, [subjects.value_subject(config.run, ">")])
    return dict(Counter(writers_of(config, subject) for subject in stored))


async def _bytes_by_writer(bus: NatsBus, config: RunConfig, kind: str, usage: StreamUsage) -> dict[str, int]:
    """Return the bytes of the newest messages by who may have written them, as far as they can be read in time."""
    found: Counter[str] = Counter()
    known: dict[str, str] = {}
    start = max(usage.first, usage.last - _NEWEST_MESSAGES + 1)
    with anyio.move_on_after(_MAX_READ_S), suppress(InfrastructureError):
        async with bus.read(kind, [], start=start, headers_only=True, follow=False) as messages:
            async for message in messages:
                subject, size = message.subject, message.headers.get(SIZE_HEADER, "")
                writer = known.get(subject) or known.setdefault(subject, writers_of(config, subject))
                found[writer] += int(size) if size.isdecimal() else 0
    return dict(found)
