"""Checks whether the streams of a run still fit each other, by all records that name their messages.

These are the marks of the store (`runtime.store_marks`), the marks in the commits and snapshots of the stateful stages
and in the ledger's newest entry, the commits that snapshots cover, the rollouts in the newest entry, and the
checkpoints. Messages that many processes may write, such as scores, decide nothing here.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.bus.skipped_messages import read_skipped
from lachesis.pipeline.errors import DamagedError, HistoryLostError, LedgerError, NotFoundError, StartupError
from lachesis.pipeline.ledger.audit import newest_group
from lachesis.pipeline.ledger.reader import newest_entry
from lachesis.pipeline.ledger.settings import LedgerSettings
from lachesis.pipeline.runtime.retention_record import read_record
from lachesis.pipeline.runtime.store_marks import (
    Contradiction,
    describe_contradictions,
    find_lost_acknowledged,
    find_rollbacks,
    read_marks,
)
from lachesis.pipeline.runtime.stream_marks import (
    ASK_AGAIN_S,
    BELIEVE_LOSS_S,
    MARKS_HEADER,
    MAX_LOST,
    StreamMarks,
    contradiction,
    has_lost_after,
    is_known_lost,
    recovery_hint,
)
from lachesis.schemas import keys, subjects
from lachesis.schemas.alerts import AlertEvent
from lachesis.schemas.annotations import CurriculumEvent, RewardEvent, StreamMark
from lachesis.schemas.codec import decode
from lachesis.schemas.control import StateSnapshot
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.replay import RescoreEvent
from lachesis.schemas.retention import Retention
from lachesis.schemas.subjects import EVENTS, LEDGER, REPLAY, ROLLOUTS, STREAMS, TEACHER

__all__ = [
    "RECOVERY_FILE",
    "describe_false_trims",
    "describe_rollback",
    "find_contradictions",
    "refuse_rolled_back",
    "stage_marks",
    "trim_limits",
    "without_false_trims",
]

RECOVERY_FILE: Final = "recovery.json"
"""File in the run's folder: a recovery that was begun and is not completed."""
_OUTPUTS: dict[str, tuple[str, Callable[..., str], Any]] = {
    "normalizer": (EVENTS, partial(subjects.event, "reward"), RewardEvent),
    "curriculum": (EVENTS, partial(subjects.event, "curriculum"), CurriculumEvent),
    "health": (EVENTS, partial(subjects.event, "alert"), AlertEvent),
    "replay": (REPLAY, partial(subjects.replay, "rescore"), RescoreEvent),
}
"""Stream, subject (of run, revision and environment) and type of the commits of each stateful stage."""


async def refuse_rolled_back(bus: NatsBus, settings: LedgerSettings) -> None:
    """Raise `HistoryLostError` if the streams of the run, or what was trimmed, do not fit.

    Raises `StartupError` if a recovery was cut off.

    A leader that was cut off may report an old state for some seconds: in a cluster the check is repeated for as long.
    """
    if (settings.folder / RECOVERY_FILE).exists():
        raise StartupError(
            f"a recovery of run {settings.run} was cut off: complete it with `lachesis runs recover {settings.run}`"
        )
    until = anyio.current_time() + (BELIEVE_LOSS_S if settings.replicas > 1 else 0.0)
    while found := await find_contradictions(bus, settings, folder=settings.folder):
        if anyio.current_time() >= until:
            raise HistoryLostError(f"{_describe(settings.run, found)}. {recovery_hint(settings.run)}")
        await anyio.sleep(ASK_AGAIN_S)
    with suppress(SchemaError, NotFoundError):  # another check reports that
        record = await read_record(bus, settings.run)
        if (false := describe_false_trims(record, await trim_limits(bus, settings, record))) is not None:
            raise HistoryLostError(f"{false}. {recovery_hint(settings.run)}")


async def trim_limits(bus: NatsBus, settings: LedgerSettings, record: Retention) -> dict[str, int]:
    """Return, by stream, the sequence below which history can have been trimmed.

    No stream is trimmed beyond its end, or beyond its marks if it went back. No rollout is trimmed without an outcome,
    which another service than the one that trims writes into a ledger of the run; a ledger that lost entries is no
    evidence of that.
    """
    last = {stream: (await bus.usage(stream)).last for stream in STREAMS}
    ends = dict(last)
    for _, marks in await read_marks(bus, settings.run, settings.folder):
        for stream, mark in marks.ends.items():
            if stream in last and mark.seq <= last[stream] + MAX_LOST:
                ends[stream] = max(ends[stream], mark.seq)
    limits = {stream: end + 1 for stream, end in ends.items()}
    if ends[LEDGER] > last[LEDGER] or record.lost.get(LEDGER):
        return limits
    watermarks = []
    for subject in await bus.stored_subjects(LEDGER, [subjects.ledger(settings.run, "*")]):
        try:
            entry, _, _ = await newest_entry(bus, settings.run, subject.rpartition(".")[2], newer="skip")
        except (LedgerError, DamagedError):
            return limits  # another check reports that
        watermarks.append(entry.watermark if entry is not None else 0)
    if watermarks:
        limits[ROLLOUTS] = min(limits[ROLLOUTS], max(watermarks) + 1)
    return limits


def without_false_trims(trimmed: Mapping[str, int], limits: Mapping[str, int]) -> dict[str, int]:
    """Return `trimmed`, by stream, up to its limits. Pure."""
    return {stream: min(below, limits[stream]) for stream, below in trimmed.items() if stream in limits}


def describe_false_trims(record: Retention, limits: Mapping[str, int]) -> str | None:
    """Return what a record calls trimmed that cannot have been, None if there is nothing. Pure."""
    beyond = {name: below for name, below in record.trimmed.items() if below > limits.get(name, below)}
    if not beyond:
        return None
    named = "; ".join(
        f"history of {name} was trimmed below sequence {below}, where {limits[name]} is the most"
        for name, below in sorted(beyond.items())
    )
    return (
        f"the key {keys.RETENTION!r} cannot be right: {named}. Losses below would pass for trimmed. Only the "
        "governor and the operator have keys to write there: if neither of them did, make new keys"
    )


async def describe_rollback(bus: NatsBus, settings: LedgerSettings) -> str | None:
    """Return how streams contradict the marks, or have holes, once the run has ended; None: they do not.

    `find_contradictions` looks at more. This reads no messages but those of a stream with very many holes.
    """
    try:
        found = await find_rollbacks(bus, settings.run, await read_marks(bus, settings.run, settings.folder))
    except NotFoundError:
        return None  # a stream is not there, which is said elsewhere
    found += await _holes(bus, settings.run)
    return f"{_describe(settings.run, found)}. `lachesis runs recover {settings.run}` says more" if found else None


def _describe(run: str, found: list[Contradiction]) -> str:
    return (
        f"the streams of run {run} do not fit each other: {describe_contradictions(found)}. The broker lost history "
        "that it had acknowledged, or a part of its store was replaced by an older copy"
    )


async def find_contradictions(bus: NatsBus, settings: LedgerSettings, *, folder: Path | None) -> list[Contradiction]:
    """Return the messages that are named elsewhere and that their stream lacks.

    `folder` is the run's, if it is on this machine.
    """
    run = settings.run
    try:
        found = await find_rollbacks(bus, run, await read_marks(bus, run, folder))
        found += await find_lost_acknowledged(bus, run, folder) if folder is not None else []
    except NotFoundError:
        return []  # the run has no streams yet
    for source, marks in await stage_marks(bus, settings):
        for stream, mark in marks.items():
            problem = await contradiction(bus, run, stream, mark)
            if problem is not None:
                found.append(Contradiction(stream, mark.seq, mark.stored_ns, source, problem))
    async for one in _lost_commits(bus, run):
        found.append(one)
    found += await _lost_snapshots(bus, settings)
    return found + await _holes(bus, run)


async def _holes(bus: NatsBus, run: str) -> list[Contradiction]:
    """Return the messages that are gone from within streams of which only the oldest messages are deleted.

    A server that lost a block of its store goes on without an error.
    """
    missing = {stream: await bus.missing(stream) for stream in (ROLLOUTS, EVENTS, TEACHER)}
    try:
        record = await read_record(bus, run)
        for stream, ranges in missing.items():
            if ranges is None and stream not in record.swept:
                missing[stream] = await _gaps(bus, stream, record.trimmed.get(stream, 1))
        record = await read_record(bus, run)  # after the questions: history is trimmed meanwhile
    except SchemaError:
        return []  # what was trimmed is not known; another check reports that
    found = []
    for stream, ranges in missing.items():
        below = record.trimmed.get(stream, 1)
        for lowest, highest in ranges or [] if stream not in record.swept else []:
            for first, last in record.unexplained(stream, lowest, highest):
                problem = f"and history was trimmed below sequence {below} alone"
                found.append(Contradiction(stream, last, 0, f"stream {stream}", problem, first))
    return found


async def _gaps(bus: NatsBus, stream: str, start: int) -> list[tuple[int, int]]:
    """Return the sequences from `start` on without a message, of a stream of which very many are gone."""
    last, following, found = (await bus.usage(stream)).last, start, list[tuple[int, int]]()
    async with bus.read(stream, [], start=start, headers_only=True, follow=False) as messages:
        async for message in messages:
            if message.seq > following:
                found.append((following, message.seq - 1))
            following = message.seq + 1
    return [*found, (following, last)] if following <= last else found


async def stage_marks(bus: NatsBus, settings: LedgerSettings) -> list[tuple[str, Mapping[str, StreamMark]]]:
    """Return what each stateful stage had read, by its last commit, its snapshot and its ledger entry."""
    run, found = settings.run, list[tuple[str, Mapping[str, StreamMark]]]()
    for stage, (stream, subject_of, model) in _OUTPUTS.items():
        if stream == REPLAY:
            continue  # a replay of history checks its own
        for subject in await bus.stored_subjects(stream, [subject_of(run, settings.revision)]):
            env = subject.rpartition(".")[2]
            event, _, _ = await read_last_event(bus, stream, subject, model, lambda _: True, newer="skip")
            if event is not None and event.commit.read:
                found.append((f"the last commit of the {stage} of {env}", event.commit.read))
    async for snapshot, subject, _, _ in _snapshots(bus, run):
        if snapshot.read:
            found.append((f"the snapshot of the {snapshot.stage} on {subject}", snapshot.read))
    try:
        entry, seq, _ = await newest_entry(bus, run, settings.trainer, newer="skip")
    except (LedgerError, DamagedError, NotFoundError):
        return found  # the ledger is broken; another check reports that
    if entry is not None:
        source = f"entry {entry.index} of the ledger"
        try:
            header = (await bus.get_head(LEDGER, seq)).headers.get(MARKS_HEADER)
            found.append((source, StreamMarks.from_header(header).newest))
        except (SchemaError, NotFoundError):
            pass
        found.append((source, await _newest_rollout(bus, entry)))
    return found


async def _newest_rollout(bus: NatsBus, entry: LedgerEntry) -> dict[str, StreamMark]:
    """Return the newest rollout that an entry refers to, as a mark that fails if another is stored there.

    If a stream ends before the last message that the entry's writer had read, that message is the mark.
    """
    ends = {ROLLOUTS: entry.watermark, EVENTS: entry.events_cursor - 1}
    beyond = {stream: seq for stream, seq in ends.items() if seq > (await bus.usage(stream)).last}
    if beyond:
        return {stream: StreamMark(seq, entry.written_ns) for stream, seq in beyond.items()}
    newest = newest_group(entry)
    if newest is None:
        return {}
    seq, group = newest
    try:
        stored = await bus.get_head(ROLLOUTS, seq)
        is_it = Plan.unpack(stored.headers.get(PLAN_HEADER)).group == group
    except NotFoundError:  # it may be trimmed
        return {ROLLOUTS: StreamMark(seq, entry.written_ns)}
    except SchemaError:
        is_it = False
    return {} if is_it else {ROLLOUTS: StreamMark(seq, entry.written_ns)}


async def _lost_commits(bus: NatsBus, run: str) -> AsyncIterator[Contradiction]:
    """Yield the commits that a snapshot covers and that are gone."""
    async for snapshot, subject, _, stored_ns in _snapshots(bus, run):
        stream, subject_of, _ = _OUTPUTS[snapshot.stage]
        revision, partition = subject.split(".")[4:]
        try:
            last = await bus.last(stream, subject_of(run, revision, partition))
        except DamagedError:
            continue  # another check reports it
        end = last.seq if last is not None else 0
        if end < snapshot.covers and not await is_known_lost(bus, run, stream, snapshot.covers):
            problem = f"what it wrote ends at sequence {end}"
            yield Contradiction(
                stream, snapshot.covers, stored_ns, f"the snapshot of the {snapshot.stage} on {subject}", problem
            )


async def _lost_snapshots(bus: NatsBus, settings: LedgerSettings) -> list[Contradiction]:
    """Return the commits that follow no snapshot and no commit: the snapshot of trimmed ones before is gone."""
    run, firsts = settings.run, dict[str, tuple[str, int]]()
    left_out = await read_skipped(bus)
    for stage, (stream, subject_of, model) in _OUTPUTS.items():
        if stream == REPLAY:
            continue  # it is never trimmed
        for subject in await bus.stored_subjects(stream, [subject_of(run, settings.revision)]):
            env, index = subject.rpartition(".")[2], await _first_index(bus, stream, subject, model)
            if index is not None:
                firsts[subjects.state(run, stage, settings.revision, env)] = f"the {stage} of {env}", index
    kept = {subject: (one, seq, ns) async for one, subject, seq, ns in _snapshots(bus, run)}  # read last: they go on
    found = []
    for state, (writer, index) in firsts.items():
        snapshot, seq, stored_ns = kept.get(state, (None, 0, 0))
        if index <= (snapshot.index + 1 if snapshot is not None else 0) or await has_lost_after(bus, run, LEDGER, seq):
            continue
        newest = await bus.last(LEDGER, state)
        if newest is not None and newest.seq in left_out.get(LEDGER, ()):
            continue  # it was left out, and that was reported
        problem = f"the newest snapshot on {state} is of commit {snapshot.index}" if snapshot else f"{state} holds none"
        source = f"{writer}, whose first commit that is left is number {index},"
        found.append(Contradiction(LEDGER, (await bus.usage(LEDGER)).last + 1, stored_ns, source, problem))
    return found


async def _first_index(bus: NatsBus, stream: str, subject: str, model: Any) -> int | None:
    """Return the number of the first commit that is left."""
    left_out = await read_skipped(bus)
    async with bus.read(stream, [subject], follow=False) as messages:
        async for message in messages:
            if message.seq in left_out.get(stream, ()):
                continue
            with suppress(SchemaError):
                index: int = decode(model, message.data).commit.index
                return index
    return None


async def _snapshots(bus: NatsBus, run: str) -> AsyncIterator[tuple[StateSnapshot, str, int, int]]:
    """Yield the snapshots of the stateful stages, each with its subject, its sequence and when it was stored."""
    patterns = [subjects.state(run, stage, "*", "*") for stage in _OUTPUTS]
    for subject in await bus.stored_subjects(LEDGER, patterns):
        if "=" in subject:
            continue  # a part of a large one
        stage = subject.split(".")[3]

        def is_ours(one: StateSnapshot, stage: str = stage) -> bool:
            return one.stage == stage

        snapshot, seq, _ = await read_last_event(bus, LEDGER, subject, StateSnapshot, is_ours, newer="skip")
        if snapshot is not None:
            yield snapshot, subject, seq, (await bus.get_head(LEDGER, seq)).time_ns
