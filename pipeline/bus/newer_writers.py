"""Finds out whether a message of a newer schema version was written by a newer build, or forged.

Four bytes, `{"v": 4}`, are a message of a newer version: any writer of a subject could end its readers with them.
So a reader believes it only if a service that may write the subject says in its own heartbeat, which no other key may
send, that its build writes that version.

Guarantees that the answer costs one wait of a few seconds a minute for the writers of a subject, however many such
messages there are; and that, beside `follow_writers`, a writer that is upgraded within that minute is believed as soon
as its heartbeat says so.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

import anyio
import msgspec

from lachesis.pipeline.access import OBSERVER, OPERATOR, Scope, roles
from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.routing import matches
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.extension import access_of
from lachesis.schemas import subjects
from lachesis.schemas.codec import UNREADABLE
from lachesis.schemas.errors import VersionError

__all__ = ["confirm_newer", "confirm_newer_value", "follow_writers", "hear_all_writers", "writers_of"]

log = logging.getLogger("lachesis")

LISTEN_S = 3.5
"""How long the writers' heartbeats, which come each second, are listened to."""
LISTEN_TO_NOBODY_S = 12.0
"""The same while no writer was heard at all: it may be starting again."""
KNOWN_S = 60.0
"""How long the answer holds."""
_PEOPLE: Final = (OPERATOR, OBSERVER)


class _Versions(msgspec.Struct):
    """What a heartbeat says of versions, whatever else its build puts into it."""

    v: int = 1
    schema_version: int = 0


@dataclass(slots=True)
class _Heard:
    """What one process knows of its run's writers."""

    listening: anyio.Lock = field(default_factory=anyio.Lock)
    versions: dict[str, int] = field(default_factory=dict)
    """By service, the newest version that it said it writes."""
    until: dict[tuple[str, ...], float] = field(default_factory=dict)
    """By services, the time of the monotonic clock until which what they said is taken for the answer."""
    disbelieved: set[tuple[str, ...]] = field(default_factory=set)
    """Services that were just found not to write a version, for `follow_writers`."""
    found: anyio.Event = field(default_factory=anyio.Event)
    """Set when there are any."""
    hears_all: bool = False
    """Whether it may listen to every service, and does so at once."""

    def listened_to(self, services: tuple[str, ...]) -> tuple[str, ...]:
        """Return whose heartbeats answer a question about `services`."""
        return ("*",) if self.hears_all else services

    def newest(self, services: Iterable[str]) -> int:
        return max((self.versions.get(service, 0) for service in services), default=0)


_HEARD: WeakKeyDictionary[Bus, _Heard] = WeakKeyDictionary()


def writers_of(run: str, subject: str) -> tuple[str, ...]:
    """Return the services of `run` whose keys may write `subject`, sorted.

    The subject is one of a stream, or that of a key's value (`subjects.value_subject`).

    Operators, who send no heartbeats in their own name, are not among them.
    """
    kinds, places = subject.split("."), {"rollout": 3, "blob": 4}
    key = subject.removeprefix(subjects.value_subject(run, ""))
    if key != subject:
        env = key.rpartition(".")[2]
    else:
        place = places.get(kinds[1], -1)
        env = kinds[place] if len(kinds) > place else kinds[-1]
    scope = Scope(
        run=run, revision="*", trainer="*", environments=(env,), foreign=(env,), trains_over_http=True
    )  # fmt: skip
    return tuple(
        sorted(
            name
            for identity, access in access_of(scope).items()
            if identity not in _PEOPLE
            for name in roles(identity)
            if any(
                matches(pattern, subject)
                for pattern in (*access.writes, *(subjects.value_subject(run, one) for one in access.sets))
            )
        )
    )


async def confirm_newer(bus: Bus, message: StoredMessage, error: VersionError, *, also: Iterable[str] = ()) -> None:
    """Raise `VersionError`, with the place, if a writer of the subject says that it writes that version.

    `also` names services that cannot have let the message pass unless they read that version. Returns where none of
    them says so: then the message is bad, as any other that cannot be read. An operator, who alone may write some
    subjects, sends no heartbeats and is believed.
    """
    services = {*writers_of(subjects.run_of(message.subject), message.subject), *also}
    place = f"sequence {message.seq} of {message.stream} ({message.subject})"
    await _confirm(bus, subjects.run_of(message.subject), services, place, error)


async def confirm_newer_value(bus: Bus, run: str, key: str, error: VersionError) -> None:
    """As `confirm_newer`, of the value of a key of the run's bucket."""
    await _confirm(bus, run, writers_of(run, subjects.value_subject(run, key)), f"the key {key!r}", error)


async def _confirm(bus: Bus, run: str, services: Iterable[str], place: str, error: VersionError) -> None:
    names = tuple(sorted(services))
    heard = _HEARD.setdefault(bus, _Heard())
    if not names:
        raise VersionError(f"{place}, written by an operator: {error}", error.version) from error
    if heard.newest(names) < error.version:
        async with heard.listening:
            known_until = heard.until.get(heard.listened_to(names), -math.inf)
            if heard.newest(names) < error.version and time.monotonic() >= known_until:
                log.warning("%s claims schema version %d: listening, %g s at most, for whether %s writes it",
                            place, error.version, LISTEN_TO_NOBODY_S, " or ".join(names))  # fmt: skip
                await _listen(bus, run, names, heard, error.version)
                heard.until[heard.listened_to(names)] = time.monotonic() + KNOWN_S
                heard.disbelieved.add(names)
                heard.found.set()
    if heard.newest(names) >= error.version:
        newer = " and ".join(name for name in names if heard.versions.get(name, 0) >= error.version)
        raise VersionError(f"{place}, written by {newer}: {error}", error.version) from error


def hear_all_writers(bus: Bus) -> None:
    """Let the first question about any writers answer those about all others.

    For people's commands, which read what many services wrote and may listen to all of them.
    """
    _HEARD.setdefault(bus, _Heard()).hears_all = True


async def follow_writers(bus: Bus, run: str) -> None:
    """Listen to writers that were not believed for as long as that answer holds; until cancelled.

    Without it, what a writer stores within a minute of its upgrade may be taken for bad.
    """
    heard = _HEARD.setdefault(bus, _Heard())

    async def follow(services: tuple[str, ...]) -> None:
        with anyio.move_on_after(KNOWN_S):
            async with background() as tasks:
                for service in services:
                    tasks.start_soon(_record_versions, bus, run, service, heard)
                await anyio.sleep_forever()

    async with background() as tasks:
        while True:
            await heard.found.wait()
            heard.found = anyio.Event()
            heard.disbelieved, found = set(), heard.disbelieved
            for services in found:
                tasks.start_soon(follow, services)


async def _listen(bus: Bus, run: str, services: tuple[str, ...], heard: _Heard, version: int) -> None:
    """Note what the services say, until one of them writes `version` or all had the time to speak."""
    anybody = anyio.Event()
    newer = anyio.Event()

    def on_version(service: str, said: int) -> None:
        anybody.set()
        if service in services and said >= version:
            newer.set()

    async with background() as tasks:
        for service in heard.listened_to(services):
            tasks.start_soon(_record_versions, bus, run, service, heard, on_version)
        with anyio.move_on_after(LISTEN_S):
            await newer.wait()
        with anyio.move_on_after(max(0.0, LISTEN_TO_NOBODY_S - LISTEN_S)):
            await anybody.wait()


async def _record_versions(
    bus: Bus,
    run: str,
    service: str,
    heard: _Heard,
    on_version: Callable[[str, int], None] = lambda _service, _version: None,
) -> None:
    decoder = msgspec.msgpack.Decoder(_Versions)
    async with bus.listen(subjects.heartbeat(run, service)) as messages:
        async for message in messages:
            try:
                beat = decoder.decode(message.data)
            except UNREADABLE:
                continue
            sender, said = message.subject.split(".")[3], max(beat.v, beat.schema_version)
            heard.versions[sender] = max(heard.versions.get(sender, 0), said)
            on_version(sender, said)
