"""Reads the ledger: verified entries in order, and the payloads of a batch."""

from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.last_event import Newer, decode_owned
from lachesis.pipeline.bus.newer_writers import confirm_newer
from lachesis.pipeline.bus.skipped_messages import SkippedMessages, read_skipped
from lachesis.pipeline.errors import DamagedError, HistoryLostError, LedgerError, NotFoundError
from lachesis.pipeline.ledger.audit import newest_group
from lachesis.pipeline.ledger.chain import PREVIOUS_HEADER, LedgerPosition
from lachesis.pipeline.ledger.entry_mismatches import describe_misfit, describe_reach
from lachesis.pipeline.runtime.stream_marks import is_known_lost, recovery_hint
from lachesis.schemas import subjects
from lachesis.schemas.annotations import TeacherLogprobs
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import DataError, SchemaError, VersionError
from lachesis.schemas.ledger import Batch, GroupRef, LedgerEntry
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import RolloutGroup

__all__ = [
    "Payload",
    "check_rollouts",
    "entry_before",
    "fetch_batch",
    "fetch_groups",
    "find_position",
    "follow_ledger",
    "newest_entry",
    "parts_of",
    "position_before",
    "refuse_misfit",
]

READ_BEFORE_TRAINERS = ("batcher", "normalizer", "scorer", "teacher")
"""Services of which at least one must have read a rollout that is in a batch: an environment may be gone by then."""

_MANY = 4
"""So many sequences without a gap are worth a request of their own."""

Payload = tuple[GroupRef, RolloutGroup, TeacherLogprobs | None]


async def follow_ledger(
    bus: Bus, run: str, trainer: str, position: LedgerPosition, *, follow: bool = True, refuse_misfits: bool = False
) -> AsyncGenerator[LedgerEntry]:
    """Yield the entries after `position`, for ever unless `follow` is false.

    `refuse_misfits`: raise `LedgerError` for an entry in the chain that the batcher cannot have written.

    Messages that are no entries are skipped. The generator holds a reader open: a caller that may stop early closes it
    in the same task (`contextlib.aclosing`).

    Raises `LedgerError` if the chain does not hold, and if the ledger is shorter than `position` says.
    """
    seq, left_out = await find_position(bus, run, trainer, position), await read_skipped(bus)
    before = (
        await _entry_at(bus, subjects.ledger(run, trainer), seq, position.entries) if seq and refuse_misfits else None
    )
    async with bus.read(subjects.LEDGER, [subjects.ledger(run, trainer)], start=seq + 1, follow=follow) as entries:
        async for message in entries:
            entry = await _entry(
                bus, message, run, trainer, follows=position.entries, newer="confirm", left_out=left_out
            )
            if entry is not None:
                position = position.after(entry)
                if refuse_misfits:
                    await refuse_misfit(bus, entry, message.seq, before)
                before = entry
                yield entry


async def refuse_misfit(bus: Bus, entry: LedgerEntry, seq: int, before: LedgerEntry | None) -> None:
    """Raise `LedgerError` if the batcher cannot have written the entry at `seq` after the one `before`."""
    misfit = describe_reach(entry, 0, 0)
    if misfit is not None:  # streams may be that long
        misfit = describe_reach(entry, *[(await bus.usage(name)).last for name in (subjects.ROLLOUTS, subjects.EVENTS)])
    if (misfit := misfit or describe_misfit(entry, before)) is not None:
        raise LedgerError(
            f"entry {entry.index} of the ledger, at sequence {seq} of LEDGER, {misfit}: the batcher did not write it. "
            f"{recovery_hint(entry.run)}"
        )


async def newest_entry(
    bus: Bus, run: str, trainer: str, *, newer: Newer = "confirm"
) -> tuple[LedgerEntry | None, int, int]:
    """Return the newest entry, its sequence, and the sequence of the subject's last message.

    None and 0 if there is no entry.

    The two sequences differ if a process other than the ledger's writer has published after the entry. The last message
    names the sequence of the entry before it; that is used only if an entry is there, and otherwise the ledger is read
    from its start. Raises `LedgerError`.
    """
    subject = subjects.ledger(run, trainer)
    last = await bus.last(subjects.LEDGER, subject)
    if last is None:
        return None, 0, 0
    left_out = await read_skipped(bus)
    before = last.headers.get(PREVIOUS_HEADER, "")
    start = int(before) if before.isdecimal() and len(before) < 19 else 0
    starts = [start, 1] if 1 < start < last.seq else [1]
    found, seq = None, 0
    for start in starts:
        found, seq = None, 0
        async with bus.read(subjects.LEDGER, [subject], start=start, follow=False) as entries:
            async for message in entries:
                entry = await _entry(
                    bus, message, run, trainer, follows=found.index + 1 if found else 0, newer=newer, left_out=left_out
                )
                if entry is None and found is None and start > 1:
                    break  # no entry is there
                if entry is not None:
                    if found is not None:
                        LedgerPosition(found.index + 1, found.digest()).after(entry)
                    found, seq = entry, message.seq
        if found is not None:
            break
    return found, seq, last.seq


async def _entry(
    bus: Bus, message: StoredMessage, run: str, trainer: str, *, follows: int, newer: Newer, left_out: SkippedMessages
) -> LedgerEntry | None:
    """Return the entry in `message`, None if it is foreign: no entry of this ledger, or one before `follows`."""

    def is_ours(entry: LedgerEntry) -> bool:
        return (entry.run, entry.trainer) == (run, trainer) and entry.index >= follows

    return await decode_owned(bus, LedgerEntry, message, is_ours, newer=newer, left_out=left_out)


async def find_position(bus: Bus, run: str, trainer: str, position: LedgerPosition) -> int:
    """Return the LEDGER sequence of the last entry that `position` covers; 0 if there is none.

    It walks back from the newest entry.

    Raises `LedgerError` if the ledger is shorter than `position`, or is a different one.
    """
    if not position.entries:
        return 0
    subject = subjects.ledger(run, trainer)
    newest, seq, _ = await newest_entry(bus, run, trainer)
    entry, seq = await _last_below(bus, subject, newest, seq, position.entries)
    if entry is None or entry.index < position.entries - 1:
        held = newest.index + 1 if newest else 0
        raise HistoryLostError(
            f"{subject} holds {held} entries, of which {position.entries} were read already: the broker lost history "
            "it had acknowledged"
        )
    if entry.digest() != position.digest:
        raise LedgerError(
            f"{subject}: entry {entry.index} is {entry.digest()[:12]}, not {position.digest[:12]} as when it was read; "
            "the broker's history was replaced"
        )
    return seq


async def position_before(bus: Bus, run: str, trainer: str, index: int) -> LedgerPosition:
    """Return the position after the entries below `index`, or after all entries if there are fewer.

    Raises `LedgerError` as `find_position` does, but accepts a ledger of any length.
    """
    if not index:
        return LedgerPosition()
    newest, seq, _ = await newest_entry(bus, run, trainer)
    entry, _ = await _last_below(bus, subjects.ledger(run, trainer), newest, seq, index)
    return LedgerPosition(entry.index + 1, entry.digest()) if entry else LedgerPosition()


async def entry_before(bus: Bus, run: str, trainer: str, entry: LedgerEntry, seq: int) -> LedgerEntry | None:
    """Return the entry before `entry` (at `seq`); None if `entry` is the first. Raises `LedgerError`."""
    before, _ = await _last_below(bus, subjects.ledger(run, trainer), entry, seq, entry.index)
    return before


async def _last_below(
    bus: Bus, subject: str, entry: LedgerEntry | None, seq: int, index: int
) -> tuple[LedgerEntry | None, int]:
    """Walk back from `entry` at `seq`; return the last entry below `index` and its sequence (None, 0: there is none).

    Raises `LedgerError` if an entry does not say which one it follows.
    """
    while entry is not None and entry.index >= index:
        previous = (await bus.get(subjects.LEDGER, seq)).headers.get(PREVIOUS_HEADER, "")
        if not previous.isdecimal() or len(previous) > len(str(seq)) or int(previous) >= seq:
            raise LedgerError(
                f"{subject}: entry {entry.index} at sequence {seq} does not say in its header {PREVIOUS_HEADER} which "
                f"message before it it follows: the batcher did not write it. {recovery_hint(subjects.run_of(subject))}"
            )
        seq = int(previous)
        entry = await _entry_at(bus, subject, seq, entry.index) if seq else None
    return entry, seq


async def _entry_at(bus: Bus, subject: str, seq: int, follower: int) -> LedgerEntry:
    """Return the entry at `seq`, which entry `follower` names as the one before it. Raises `DamagedError`."""
    try:
        message = await bus.get(subjects.LEDGER, seq)
        if message.subject == subject:
            return decode(LedgerEntry, message.data)
    except SchemaError as error:
        if isinstance(error, VersionError):
            raise
    except NotFoundError as error:
        raise DamagedError(
            f"{subject}: the entry before entry {follower}, at sequence {seq} of {subjects.LEDGER}, is gone: it was "
            "deleted, or the server's store is damaged; restore the store from a backup, or start a new run"
        ) from error
    raise LedgerError(
        f"{subject}: entry {follower} says that it follows the message at sequence {seq}, which is no entry of this "
        f"ledger: the batcher did not write it. {recovery_hint(subjects.run_of(subject))}"
    )


async def check_rollouts(bus: Bus, entry: LedgerEntry) -> None:
    """Raise `HistoryLostError` if the newest rollout that `entry` refers to is a different one by now.

    Then ROLLOUTS alone went back, and rollouts stored since under old sequences would count as settled.
    """
    newest = newest_group(entry)
    if newest is None:
        return
    seq, group = newest
    if await is_known_lost(bus, entry.run, subjects.ROLLOUTS, seq):
        return
    try:
        stored = await bus.get_head(subjects.ROLLOUTS, seq)
        found = Plan.unpack(stored.headers.get(PLAN_HEADER)).group
    except NotFoundError:
        return  # trimmed; a stream that ends before it is refused by its reader
    except SchemaError:
        found = "no rollout"
    if found != group:
        raise HistoryLostError(
            f"sequence {seq} of ROLLOUTS holds {found}, but entry {entry.index} of the ledger says {group}: the "
            f"broker lost history that it had acknowledged. {recovery_hint(entry.run)}"
        )


async def fetch_batch(bus: Bus, batch: Batch) -> list[Payload]:
    """Return the batch's groups with their payloads and teacher logprobs, in the batch's order.

    Raises `DataError`, which names the group, if a payload is missing, cannot be read or is another group's.
    """
    found, failures = await fetch_groups(bus, batch)
    if failures:
        raise next(iter(failures.values()))
    return found


async def fetch_groups(
    bus: Bus, batch: Batch, kind: type[RolloutGroup] = RolloutGroup
) -> tuple[list[Payload], dict[int, DataError]]:
    """Return the readable groups of the batch, and the errors of the others by sequence in ROLLOUTS.

    `kind`: `PackedGroup` leaves their texts packed.

    The errors are those that `fetch_batch` raises. Raises `VersionError`, which says nothing about the group, and
    `InfrastructureError`.
    """
    rollouts, gone = await _fetch(bus, subjects.ROLLOUTS, [ref.seq for ref in batch.groups], subjects.rollout("*"))
    teachers = [ref.teacher for ref in batch.groups if ref.teacher is not None and ref.seq not in gone]
    logprobs, gone_logprobs = await _fetch(bus, subjects.TEACHER, teachers, subjects.logprobs("*", "*"))
    found: list[Payload] = []
    failures: dict[int, DataError] = {}
    for ref in batch.groups:
        error = gone.get(ref.seq) or (gone_logprobs.get(ref.teacher) if ref.teacher is not None else None)
        try:
            if error is not None:
                raise error
            found.append(_payload(batch.number, ref, rollouts, logprobs, kind))
        except DataError as failure:
            if isinstance(failure, VersionError):
                await confirm_newer(bus, rollouts[ref.seq], failure, also=READ_BEFORE_TRAINERS)
            failures[ref.seq] = failure
    return found, failures


def _payload(
    number: int,
    ref: GroupRef,
    rollouts: Mapping[int, StoredMessage],
    logprobs: Mapping[int, StoredMessage],
    kind: type[RolloutGroup],
) -> Payload:
    group = decode(kind, rollouts[ref.seq].data)
    if group.id != ref.group:
        raise DataError(f"batch {number}: sequence {ref.seq} holds group {group.id}, not {ref.group}")
    if ref.teacher is None:
        return ref, group, None
    teacher = decode(TeacherLogprobs, logprobs[ref.teacher].data)
    if teacher.group != ref.group or teacher.n_tokens != group.sequences.n_tokens:
        raise DataError(f"batch {number}: teacher logprobs at {ref.teacher} do not fit group {ref.group}")
    return ref, group, teacher


async def _fetch(
    bus: Bus, stream: str, seqs: Iterable[int], subject: str
) -> tuple[dict[int, StoredMessage], dict[int, DataError]]:
    """Return the messages by sequence, all on `subject`, and errors for missing ones."""
    found: dict[int, StoredMessage] = {}
    gone: dict[int, DataError] = {}
    for part, is_whole in parts_of(sorted(set(seqs))):
        wanted = deque(part)
        while wanted:
            try:
                async for message in bus.fetch(stream, list(wanted), subject if is_whole else None):
                    found[wanted.popleft()] = message
            except NotFoundError as error:  # it names the sequence that was read
                failure = DataError(f"a payload of the batch is gone from {stream}: {error}")
                failure.__cause__ = error
                gone[wanted.popleft()] = failure
    return found, gone


def parts_of(seqs: Sequence[int]) -> list[tuple[list[int], bool]]:
    """Cut rising `seqs` into parts, each with whether one request is to ask for all of it.

    It is where the part has no gap. Others are requested one by one: what lies between would be read as well.
    """
    runs: list[list[int]] = []
    for seq in seqs:
        if runs and seq == runs[-1][-1] + 1:
            runs[-1].append(seq)
        else:
            runs.append([seq])
    parts: list[tuple[list[int], bool]] = []
    for run in runs:
        if len(run) >= _MANY:
            parts.append((run, True))
        elif parts and not parts[-1][1]:
            parts[-1][0].extend(run)
        else:
            parts.append((run, False))
    return parts
