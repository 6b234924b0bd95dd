"""The reading side of the ledger: verified entries in order, and the payloads of a batch."""

from collections.abc import AsyncGenerator, Sequence

from lachesis.pipeline.batching.chain import PREVIOUS_HEADER, Position
from lachesis.pipeline.bus.api import Bus, Stored
from lachesis.schemas import subjects
from lachesis.schemas.annotations import TeacherLogprobs
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import DataError, LedgerError, NotFoundError
from lachesis.schemas.ledger import Batch, GroupRef, LedgerEntry
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["Payload", "fetch_batch", "follow_ledger"]

Payload = tuple[GroupRef, RolloutGroup, TeacherLogprobs | None]


async def follow_ledger(
    bus: Bus, run: str, trainer: str, position: Position, *, follow: bool = True
) -> AsyncGenerator[LedgerEntry]:
    """Yield the entries after `position`, for ever unless `follow` is false.

    It holds a reader open: whoever may stop early closes it in the same task (`contextlib.aclosing`).

    Raises `LedgerError` where the chain does not hold, and when the ledger is shorter than `position` says.
    """
    subject = subjects.ledger(run, trainer)
    seq = await _find(bus, subject, position) if position.entries else 0
    async with bus.read(subjects.LEDGER, [subject], start=seq + 1, follow=follow) as entries:
        async for message in entries:
            entry = decode(LedgerEntry, message.data)
            position = position.after(entry)
            yield entry


async def _find(bus: Bus, subject: str, position: Position) -> int:
    """Return the sequence in LEDGER of the last entry that `position` knows, walking back from the newest."""
    message = await bus.last(subjects.LEDGER, subject)
    while message is not None:
        entry = decode(LedgerEntry, message.data)
        if entry.index < position.entries:
            if Position(entry.index + 1, entry.digest()) == position:
                return message.seq
            if entry.index == position.entries - 1:
                raise LedgerError(
                    f"{subject}: entry {entry.index} is {entry.digest()[:12]}, not {position.digest[:12]} as when it "
                    "was read; the broker's history was replaced: restore its store, or start a new run"
                )
            break
        previous = message.headers.get(PREVIOUS_HEADER, "")
        if not previous.isdecimal():
            raise LedgerError(f"{subject}: entry {entry.index} has no header {PREVIOUS_HEADER}; who wrote it?")
        message = await bus.get(subjects.LEDGER, int(previous)) if int(previous) else None
    newest = await bus.last(subjects.LEDGER, subject)
    held = decode(LedgerEntry, newest.data).index + 1 if newest else 0
    raise LedgerError(
        f"{subject} holds {held} entries, of which {position.entries} were read already: the broker lost history it "
        "had acknowledged; restore its store, or start a new run"
    )


async def fetch_batch(bus: Bus, batch: Batch) -> list[Payload]:
    """Return the batch's groups with their payloads and teacher logprobs, in the batch's order.

    Raises `DataError` naming the group when a payload is missing, cannot be read or is another group's.
    """
    rollouts = await _fetch(bus, subjects.ROLLOUTS, [ref.seq for ref in batch.groups])
    teachers = await _fetch(bus, subjects.TEACHER, [ref.teacher for ref in batch.groups if ref.teacher is not None])
    found: list[Payload] = []
    for ref in batch.groups:
        group = decode(RolloutGroup, rollouts[ref.seq].data)
        if group.id != ref.group:
            raise DataError(f"batch {batch.number}: sequence {ref.seq} holds group {group.id}, not {ref.group}")
        teacher = None
        if ref.teacher is not None:
            teacher = decode(TeacherLogprobs, teachers[ref.teacher].data)
            if teacher.group != ref.group or teacher.n_tokens != group.sequences.n_tokens:
                raise DataError(f"batch {batch.number}: teacher logprobs at {ref.teacher} do not fit group {ref.group}")
        found.append((ref, group, teacher))
    return found


async def _fetch(bus: Bus, stream: str, seqs: Sequence[int]) -> dict[int, Stored]:
    """Return the messages by sequence, asked for in ascending order, which is several times faster."""
    try:
        return {message.seq: message async for message in bus.fetch(stream, sorted(set(seqs)))}
    except NotFoundError as error:
        raise DataError(f"a payload of the batch is gone from {stream}: {error}") from error
