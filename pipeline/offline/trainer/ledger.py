"""Forms and checks an offline trainer's ledger from a finished revision; stores it before training.

Reads the rewards of a revision and their rollouts. Writes the trainer's own ledger, with the code that forms live
batches, and a record of its sources. Guarantees:

* nothing is stored unless every rollout can be trained on: one that was trimmed, cannot be read, has no logprobs, lacks
  those of the teacher where they are required, or was made with another tokenizer is an error that says which;
* the same revision and settings give the same entries to the bit; the next start goes on where one was killed, and a
  start under the same name with other settings is refused;
* the ledger of the live trainer is never touched, and what is yet to be trained on is not trimmed.
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import LedgerError, NotFoundError, StreamFullError
from lachesis.pipeline.ledger.chain import PREVIOUS_HEADER
from lachesis.pipeline.ledger.offline_start import OfflineStart
from lachesis.pipeline.ledger.reader import follow_ledger, newest_entry, position_before
from lachesis.pipeline.offline.replay.logic.rollout_filter import differences
from lachesis.pipeline.offline.replay.outage import retrying
from lachesis.pipeline.offline.replay.results import RevisionResult, read_results, revision_digest
from lachesis.pipeline.offline.replay.revisions import definition
from lachesis.pipeline.offline.trainer.batch_former import OfflineBatchFormer, entry_content_digest
from lachesis.pipeline.offline.trainer.teacher import Progress, WithTeacher, attach_teacher, validated
from lachesis.pipeline.retention.holds import holding
from lachesis.pipeline.retention.retention_floor import lowest_seqs
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.ledger import GENESIS, LedgerEntry, TrainReport
from lachesis.schemas.replay import OfflineTrainerRecord, RevisionRecord
from lachesis.schemas.subjects import LEDGER, ROLLOUTS, TEACHER

__all__ = [
    "OfflineRequest",
    "lowest_seq_needed_after",
    "open_offline_ledger",
    "read_offline_trainer",
    "rebuild_entries",
]

_DEFINITION = (
    "revision", "digest", "model", "start", "max_staleness", "min_step", "max_step",
    "batch_size", "token_budget", "mix", "teacher", "std_floor",
)  # fmt: skip

_MAX_LEDGER_SHARE = 0.7
"""Share of LEDGER's budget that may be taken; a live run is granted nothing more from `flow.close_at` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRequest:
    """Which trainer, on which revision, from which model (`start`: the optimizer step of the run that it is of).

    `tokenizer_hash` is that of the model; None: not compared. Without `store` nothing is written.
    """

    trainer: str
    revision: str
    model: str = ""
    start: int = 0
    max_staleness: int | None = None
    min_step: int | None = None
    max_step: int | None = None
    tokenizer_hash: str | None = None
    store: bool = True


async def read_offline_trainer(bus: Bus, run: str, trainer: str) -> OfflineTrainerRecord | None:
    """Return what an offline trainer trains on; None for the name of no offline trainer."""
    found, _, _ = await read_last_event(
        bus,
        LEDGER,
        subjects.offline_trainer(run, trainer),
        OfflineTrainerRecord,
        lambda record: (record.run, record.trainer) == (run, trainer),
    )
    return found


@asynccontextmanager
async def open_offline_ledger(
    bus: Bus, config: RunConfig, request: OfflineRequest, *, progress: Progress
) -> AsyncIterator[tuple[OfflineTrainerRecord, Callable[[LedgerEntry], None]]]:
    """Store the offline trainer's whole ledger and yield it, holding its rollouts back from trimming.

    With it comes a function to be called for each entry that no longer needs its rollouts.

    Raises `ConfigError` where the name is another trainer's, `NotFoundError` where there is no such revision or its
    rollouts are gone or none can be trained on, `DataError` where they cannot be used, `LedgerError` where the ledger
    or the revision is not what was stored, `FencedError` when another process writes the same ledger.
    """
    run, trainer = config.run, subjects.check_name("trainer", request.trainer)
    if trainer == config.training.name:
        raise ConfigError(f"trainer {trainer!r} is the live one; give the one on past rollouts a name of its own")
    revision = await definition(bus, config, request.revision)
    if revision is None:
        raise ConfigError(
            f"revision {request.revision!r} is the live one, which the run itself trains on; `lachesis replay` scores "
            "its history under a name of its own, with the same settings if you like"
        )
    asked = await _define(bus, config, request, revision)
    stored = await read_offline_trainer(bus, run, trainer)
    if stored is not None and (changed := differences(stored, asked, _DEFINITION)):
        raise ConfigError(
            f"trainer {trainer!r} exists and is another: {'; '.join(changed)}. Give this one another name, or repeat "
            "the command that began that one"
        )
    entry, _, _ = await newest_entry(bus, run, trainer)
    if entry is not None and stored is None:
        raise ConfigError(
            f"trainer {trainer!r} of run {run} has a ledger already that is of no revision; take another name"
        )
    with_teacher: list[WithTeacher] = []
    if stored is not None and entry is not None and entry.index + 1 == stored.entries:
        ahead = await _ahead(bus, stored)
        needs = ahead[min(ahead)]
    else:
        with_teacher = await attach_teacher(
            bus, asked, config.revision, _select(await read_results(bus, revision), asked)
        )
        needs = lowest_seqs([(one.result.seq, one.teacher) for one in with_teacher])
    async with holding(bus, run, "train", needs, about=f"train {trainer} on {request.revision}") as held:
        if with_teacher:
            stored = await _form(bus, asked, stored, with_teacher, request=request, progress=progress)
            ahead = await _ahead(bus, stored) if request.store else {}
        assert stored is not None  # noqa: S101 - a ledger that is whole has a record

        def trained(entry: LedgerEntry) -> None:
            held.needs.update(ahead.get(entry.index, {}))

        yield stored, trained


async def _define(
    bus: Bus, config: RunConfig, request: OfflineRequest, revision: RevisionRecord
) -> OfflineTrainerRecord:
    return OfflineTrainerRecord(
        run=config.run,
        trainer=request.trainer,
        revision=request.revision,
        digest=await revision_digest(bus, revision),
        model=request.model,
        start=request.start,
        max_staleness=request.max_staleness,
        min_step=request.min_step,
        max_step=request.max_step,
        batch_size=config.batching.batch_size,
        token_budget=config.batching.token_budget,
        mix=config.batching.mix,
        teacher=config.batching.teacher,
        std_floor=config.advantage.std_floor,
        entries=0,
        batches=0,
        groups=0,
        chain=GENESIS,
        manifest=GENESIS,
        created_ns=time.time_ns(),
    )


def _select(results: Sequence[RevisionResult], asked: OfflineTrainerRecord) -> list[RevisionResult]:
    """Return the rollouts that have a reward and lie within the requested policy steps. Raises `NotFoundError`."""
    low, high = asked.min_step, asked.max_step
    rewarded = [one for one in results if one.reward is not None]
    found = [
        one
        for one in rewarded
        if one.reward is not None
        and (low is None or one.reward.policy_step >= low)
        and (high is None or one.reward.policy_step <= high)
    ]
    if not found:
        steps = sorted({one.reward.policy_step for one in rewarded if one.reward is not None})
        made = f"; they were made by policy steps {steps[0]} to {steps[-1]}" if steps else ""
        raise NotFoundError(
            f"nothing to train on: of {len(rewarded)} rollouts with a reward in revision {asked.revision!r} none is "
            f"selected{made}"
        )
    return found


async def _ahead(bus: Bus, record: OfflineTrainerRecord) -> dict[int, dict[str, int]]:
    """Return by entry the lowest sequence of each stream that is to be fetched after it.

    It begins with the last entry that the trainer has reported on.
    """
    run, trainer = record.run, record.trainer
    report, _, _ = await read_last_event(
        bus, LEDGER, subjects.state(run, "trainer", subjects.LIVE, trainer), TrainReport, lambda one: one.run == run
    )
    begin = await position_before(bus, run, trainer, report.ledger_index + 1 if report else 0)
    streams = [ROLLOUTS] if record.teacher == "off" else [ROLLOUTS, TEACHER]
    ends = {stream: (await bus.usage(stream)).last + 1 for stream in streams}
    async with aclosing(follow_ledger(bus, run, trainer, begin, follow=False)) as entries:
        return lowest_seq_needed_after([entry async for entry in entries], record.entries - 1, ends)


def lowest_seq_needed_after(
    entries: Sequence[LedgerEntry], last: int, ends: Mapping[str, int]
) -> dict[int, dict[str, int]]:
    """Return by entry the lowest sequence of each stream that the later entries refer to.

    It begins with the entry before the first of `entries`; `ends` where no later entry refers to a stream. `last` is
    the index of the ledger's last entry.
    """
    lowest = dict(ends)
    found = {last: lowest}
    for entry in reversed(entries):
        if entry.batch is not None:
            needed = lowest_seqs((ref.seq, ref.teacher) for ref in entry.batch.groups)
            lowest = {stream: min(seq, needed.get(stream, seq)) for stream, seq in lowest.items()}
        found[entry.index - 1] = lowest
    return found


class _FormedEntry(NamedTuple):
    """An entry of the ledger, encoded."""

    digest: str
    data: bytes


async def _form(
    bus: Bus,
    asked: OfflineTrainerRecord,
    stored: OfflineTrainerRecord | None,
    wanted: Sequence[WithTeacher],
    *,
    request: OfflineRequest,
    progress: Progress,
) -> OfflineTrainerRecord:
    """Form the whole ledger, and store what of it is not stored yet."""
    batch_former = _former(stored or asked, term=f"offline-{time.time_ns():x}")
    formed: list[_FormedEntry] = []

    def keep(entry: LedgerEntry) -> None:
        formed.append(_FormedEntry(entry.digest(), encode(entry)))

    async for group in validated(bus, wanted, request.tokenizer_hash, progress):
        for entry in batch_former.add(group):
            keep(entry)
    for entry in batch_former.finish():
        keep(entry)
    if not batch_former.batches:
        raise NotFoundError(
            f"nothing to train on: of {len(wanted)} rollouts of revision {asked.revision!r} none can be batched "
            "(zero variance, stale or oversized all of them)"
        )
    record = (stored or asked).replace(
        entries=len(formed),
        batches=batch_former.batches,
        groups=batch_former.groups,
        chain=batch_former.chain,
        manifest=batch_former.manifest,
    )
    if stored is not None and record != stored:
        raise LedgerError(
            f"trainer {record.trainer} of run {record.run}: revision {record.revision} gives {record.batches} batches "
            f"with digest {record.manifest[:12]} now, and gave {stored.batches} with {stored.manifest[:12]}: rollouts, "
            "rewards or the teacher's logprobs are not what they were; train under another name"
        )
    if request.store:
        await _store(bus, record, formed, is_new=stored is None)
    return record


def _former(record: OfflineTrainerRecord, term: str = "") -> OfflineBatchFormer:
    config = BatchingConfig(
        batch_size=record.batch_size, token_budget=record.token_budget, mix=record.mix, teacher=record.teacher
    )
    start = OfflineStart(record.start, record.max_staleness)
    return OfflineBatchFormer(
        record.run, record.trainer, config, start, std_floor=record.std_floor, term=term, written_ns=time.time_ns()
    )


async def _store(bus: Bus, record: OfflineTrainerRecord, formed: Sequence[_FormedEntry], *, is_new: bool) -> None:
    """Store the record first, and the entries after it that are not stored yet."""
    run, trainer = record.run, record.trainer
    subject = subjects.ledger(run, trainer)
    last, entry_seq, seq = await newest_entry(bus, run, trainer, newer="refuse")
    begin = last.index + 1 if last else 0
    if last is not None and (begin > len(formed) or formed[last.index].digest != last.digest()):
        raise LedgerError(f"{subject}: entry {last.index} is not what revision {record.revision} gives; who wrote it?")
    usage, size = await bus.usage(LEDGER), sum(len(entry.data) for entry in formed[begin:])
    if usage.bytes + size > _MAX_LEDGER_SHARE * usage.max_bytes:
        raise StreamFullError(
            f"{subject}: its {size} bytes do not fit beside the {usage.bytes} of {usage.max_bytes} that {LEDGER} "
            "holds, which a live run needs room in: raise streams.ledger_bytes and `lachesis init`, or select less"
        )
    if is_new:
        name = subjects.offline_trainer(run, trainer)
        await retrying(f"write {name}")(
            bus.commit, name, encode(record), expected=0, msg_id=f"{name}.{record.created_ns}"
        )
    stored_ns = time.time_ns()  # of this start: what an earlier one stored may be deleted, and is no duplicate then
    for index, entry in enumerate(formed[begin:], begin):
        headers = {PREVIOUS_HEADER: str(entry_seq)}
        msg_id = f"{subject}.{stored_ns}.{index}"
        seq = await retrying(f"write {subject}")(
            bus.commit, subject, entry.data, expected=seq, msg_id=msg_id, headers=headers
        )
        entry_seq = seq


async def rebuild_entries(
    bus: Bus,
    record: OfflineTrainerRecord,
    results: Sequence[RevisionResult],
    teachers: Mapping[int, int],
    progress: Progress,
) -> list[str]:
    """Return the content digest of each entry that a revision gives when its ledger is formed again.

    `results` are all of the revision, `teachers` the sequences in TEACHER that the ledger names, by rollout. Raises as
    `open_offline_ledger`.
    """
    # what is in no batch was left out for another reason: where it was required, it had a teacher as well
    other = 1 if record.teacher == "required" else None
    wanted = [WithTeacher(one, teachers.get(one.seq, other)) for one in _select(results, record)]
    batch_former = _former(record)
    digests = []
    async for group in validated(bus, wanted, None, progress, logprobs=False):
        digests += [entry_content_digest(entry) for entry in batch_former.add(group)]
    return digests + [entry_content_digest(entry) for entry in batch_former.finish()]
