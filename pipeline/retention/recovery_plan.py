"""Plans how a run goes on if its streams do not fit each other any more.

Lost messages stay lost; the rest is kept. Sequences that anything refers to are never used again: the streams that went
back are filled up beyond them, so that data derived from a lost message is never taken for another message's. Rollouts
that already took such sequences are stored again. Rollouts without an outcome are scored again if their scores were
lost. Training goes back to the newest checkpoint that the ledger knows.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import anyio.to_thread
import msgspec

from lachesis.pipeline.bus.api import StoredMessage, StreamUsage
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.bus.skipped_messages import NOTHING, SkippedMessages, skipping
from lachesis.pipeline.errors import CheckpointError, DamagedError, LedgerError, NotFoundError, StartupError
from lachesis.pipeline.ledger.audit import settled_rollouts
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, TrainerState, known_checkpoints, latest_checkpoint
from lachesis.pipeline.ledger.checkpoint_sums import verify_sums
from lachesis.pipeline.ledger.reader import find_position, follow_ledger, newest_entry
from lachesis.pipeline.ledger.rollbacks import find_contradictions, stage_marks, trim_limits, without_false_trims
from lachesis.pipeline.retention.recovery_record import CheckpointChange, RecoveryPlan, StreamLoss, complete_record
from lachesis.pipeline.retention.settings import RecoverySettings
from lachesis.pipeline.runtime.retention_record import decode_record, read_record, reading_instead
from lachesis.pipeline.runtime.store_marks import Contradiction, read_marks
from lachesis.pipeline.runtime.stream_marks import MAX_LOST
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import RewardEvent, ScoreEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord, StateSnapshot
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.retention import Retention
from lachesis.schemas.subjects import BUCKET, EVENTS, LEDGER, ROLLOUTS, kind_of

__all__ = ["UnusableState", "copied_ends", "make_plan"]

_MAX_EVENTS_READ = 4096


class UnusableState(NamedTuple):
    """Messages and keys that their own services cannot use: where they are, and what is wrong, in words."""

    left_out: SkippedMessages = NOTHING
    keys: Mapping[str, bytes] = MappingProxyType({})
    problems: Sequence[str] = ()
    from_first_model: bool = False
    """Whether a person says that no checkpoint is left anywhere, so that none elsewhere is expected."""


async def make_plan(
    bus: NatsBus,
    settings: RecoverySettings,
    name: str,
    unusable: UnusableState = UnusableState(),  # noqa: B008 - immutable
) -> RecoveryPlan | None:
    """Return the plan, or None if all streams fit. `name` is the recovery's own.

    Raises `StartupError` if the run cannot go on.
    """
    record, record_problem = await _whole_record(bus, settings, unusable)
    if record_problem is not None:
        unusable = unusable._replace(problems=[*unusable.problems, record_problem])
    with skipping(unusable.left_out), skipping(record.left_out), reading_instead(record):
        return await _make_plan(bus, settings, name, unusable, record if record_problem is not None else None)


async def _whole_record(
    bus: NatsBus, settings: RecoverySettings, unusable: UnusableState
) -> tuple[Retention, str | None]:
    """Return the retention record with all that is known of it, and what the stored one lacks, in words."""
    run, entry = settings.run, await bus.value(keys.RETENTION)
    stored = None
    if entry is not None and keys.RETENTION not in unusable.keys:
        try:
            stored = decode_record(entry, run)
        except SchemaError as error:
            raise StartupError(str(error)) from error
    record = await anyio.to_thread.run_sync(complete_record, stored, run, settings.folder)
    limits = await trim_limits(bus, settings, record)  # a copy in the folder may repeat what was false in the key
    record = record.replace(trimmed=without_false_trims(record.trimmed, limits))
    empty = Retention(run=run)
    if record == (stored or empty).with_lists_of(empty):
        return record, None
    state = "is not there" if entry is None else "cannot be read" if stored is None else "went back"
    return record, f"the key {keys.RETENTION!r} {state}: it lacks what was known to be lost, left out or trimmed before"


async def _make_plan(
    bus: NatsBus, settings: RecoverySettings, name: str, unusable: UnusableState, record: Retention | None
) -> RecoveryPlan | None:
    found = await find_contradictions(bus, settings, folder=settings.folder)
    losses = await _losses(bus, found)
    known = [one.marks.trimmed for one in await read_marks(bus, settings.run, settings.folder)]
    trimmed = dict((await read_record(bus, settings.run)).trimmed)
    for stream, below in ((stream, below) for marks in known for stream, below in marks.items()):
        trimmed[stream] = max(below, trimmed.get(stream, 1))
    trimmed = without_false_trims(trimmed, await trim_limits(bus, settings, await read_record(bus, settings.run)))
    try:
        entry, _, _ = await newest_entry(bus, settings.run, settings.trainer)
        change, report, policy, faults = await _training(
            bus, settings, entry, trimmed, is_here=unusable.from_first_model
        )
    except DamagedError as error:
        raise StartupError(f"run {settings.run} cannot go on, its ledger is damaged itself: {error}") from error
    problems = [*dict.fromkeys(map(str, found)), *faults, *unusable.problems]
    if (change is not None or report is not None) and not faults:
        problems.append("the newest checkpoint, the trainer's last report and the ledger do not fit each other")
    if policy is not None:
        problems.append(f"weights of step {policy.policy_version.step} are published, but the ledger holds no batch")
    if not problems:
        return None
    rollouts = [loss for loss in losses if loss.stream == ROLLOUTS]
    groups, settled = await _names(bus, settings, rollouts) if rollouts else ({}, 0)
    copied = await copied_ends(bus, settings) if losses else {}
    return RecoveryPlan(
        run=settings.run,
        id=name,
        problems=problems,
        losses=losses,
        bucket_went_back=any(one.stream == BUCKET for one in found),
        groups=groups,
        settled=settled,
        copies=[one.seq for loss in rollouts async for one in _rollouts(bus, settings.run, loss)],
        rescore_from=await _unscored_from(bus, settings, entry)
        if any(one.stream == EVENTS for one in losses)
        else None,
        checkpoint=change,
        report=report,
        policy=policy,
        trimmed=trimmed,
        reports=await _reports_read(bus, settings) if report is not None else [],
        ends={stream: one.last for stream, one in copied.items()},
        ended_ns={stream: one.last_ns for stream, one in copied.items()},
        left_out={stream: sorted(seqs) for stream, seqs in unusable.left_out.items()},
        keys=dict(unusable.keys),
        elsewhere=None if unusable.from_first_model else await _elsewhere(bus, settings),
        earlier=record,
    )


async def copied_ends(bus: NatsBus, settings: RecoverySettings) -> dict[str, StreamUsage]:
    """Return the ends of the streams and the bucket that have, or should have, copies in a cluster."""
    found = {kind_of(one.name): one for one in await bus.describe_streams()}
    return {stream: one.usage for stream, one in found.items() if max(one.replicas, settings.replicas) > 1}


async def _losses(bus: NatsBus, found: list[Contradiction]) -> list[StreamLoss]:
    losses = [
        StreamLoss(stream=one.stream, first=one.first, last=one.seq, end=(await bus.usage(one.stream)).last)
        for one in found
        if one.first
    ]
    ends = [one for one in found if not one.first and not await _is_beyond_belief(bus, one)]
    for stream in sorted({one.stream for one in ends}):
        named = [one for one in ends if one.stream == stream]
        first, last = min(one.seq for one in named), max(one.seq for one in named)
        end = (await bus.usage(stream)).last
        if stream != BUCKET:  # sequences of the bucket are used again: only note what no longer counts as missing
            before_ns = min(one.before_ns for one in named)  # the stream may have gone back more than once
            first = min(first, await _first_lost(bus, stream, last, before_ns))
        losses.append(StreamLoss(stream=stream, first=first, last=last, end=end))
    return _without_overlaps(losses)


def _without_overlaps(losses: list[StreamLoss]) -> list[StreamLoss]:
    """Return the losses of each stream in order, those that overlap as one."""
    found: list[StreamLoss] = []
    for loss in sorted(losses, key=lambda one: (one.stream, one.first)):
        if found and found[-1].stream == loss.stream and loss.first <= found[-1].last:
            found[-1] = msgspec.structs.replace(found[-1], last=max(found[-1].last, loss.last))
        else:
            found.append(loss)
    return found


async def _is_beyond_belief(bus: NatsBus, contradiction: Contradiction) -> bool:
    """Whether a mark names a sequence that the stream cannot have held.

    Such a mark is written again, and the stream is not filled up to it.
    """
    return contradiction.seq > (await bus.usage(contradiction.stream)).last + MAX_LOST


async def _first_lost(bus: NatsBus, stream: str, last: int, before_ns: int) -> int:
    """Return the sequence after the newest message stored before the loss; a binary search, since times rise."""
    low, high = 1, last
    while low < high:
        middle = (low + high) // 2
        first = await _first_at(bus, stream, middle)
        if first is None or first.seq > last or first.time_ns > before_ns:
            high = middle
        else:
            low = min(first.seq + 1, high)
    return low


async def _first_at(bus: NatsBus, stream: str, seq: int) -> StoredMessage | None:
    if seq > (await bus.usage(stream)).last:
        return None
    async with bus.read(stream, [], start=seq, headers_only=True, follow=False) as messages:
        async for message in messages:
            return message
    return None


async def _rollouts(bus: NatsBus, run: str, loss: StreamLoss) -> AsyncIterator[StoredMessage]:
    """Yield the rollouts that took lost sequences, without their data."""
    if loss.first > loss.end:
        return
    async with bus.read(
        ROLLOUTS, [subjects.rollout(run)], start=loss.first, headers_only=True, follow=False
    ) as messages:
        async for message in messages:
            if message.seq > loss.last:
                return
            yield message


async def _names(bus: NatsBus, settings: RecoverySettings, losses: list[StreamLoss]) -> tuple[dict[int, str], int]:
    """Return the lost rollouts that scores, rewards and the ledger name, by sequence, and how many had an outcome."""
    found: dict[int, str] = {}
    start = max(1, (await bus.usage(EVENTS)).last - _MAX_EVENTS_READ)
    kinds: tuple[tuple[str, type[ScoreEvent | RewardEvent]], ...] = (
        ("score", ScoreEvent),
        ("reward", RewardEvent),
    )
    for kind, model in kinds:
        subject = f"rl.{kind}.{settings.run}.{settings.revision}.*"
        async with bus.read(EVENTS, [subject], start=start, follow=False) as messages:
            async for message in messages:
                with suppress(SchemaError):
                    event = decode(model, message.data)
                    found |= {one.seq: one.group for one in event.groups if _is_lost(losses, one.seq)}
    named, settled = await _settled(bus, settings, losses)
    return dict(sorted({**found, **named}.items())), settled


async def _settled(bus: NatsBus, settings: RecoverySettings, losses: list[StreamLoss]) -> tuple[dict[int, str], int]:
    """Return the lost rollouts that the ledger names, by sequence, and how many it has given their outcome."""
    named: dict[int, str] = {}
    seqs: set[int] = set()
    watermark = 0
    with suppress(LedgerError):  # a ledger that is broken itself names those before that
        async for entry in follow_ledger(bus, settings.run, settings.trainer, LedgerPosition(), follow=False):
            watermark = entry.watermark
            seqs.update(seq for seq in settled_rollouts(entry) if _is_lost(losses, seq))
            refs = [(ref.seq, ref.group) for ref in entry.batch.groups] if entry.batch else []
            refs += [(one.seq, one.group) for one in entry.outcomes if one.group is not None]
            named |= {seq: group for seq, group in refs if _is_lost(losses, seq)}
    below = sum(max(0, min(loss.last, watermark) + 1 - loss.first) for loss in losses)
    return named, below + sum(1 for seq in seqs if seq > watermark)


def _is_lost(losses: list[StreamLoss], seq: int) -> bool:
    return any(loss.first <= seq <= loss.last for loss in losses)


async def _unscored_from(bus: NatsBus, settings: RecoverySettings, entry: LedgerEntry | None) -> int:
    """Return the lowest sequence of ROLLOUTS with a score that the batcher or a normalizer may still need."""
    needed = [entry.watermark + 1 if entry is not None else 1]
    for env in settings.environments:
        subject = subjects.event("reward", settings.run, settings.revision, env)
        event, _, _ = await read_last_event(bus, EVENTS, subject, RewardEvent, lambda _: True, newer="skip")
        state = subjects.state(settings.run, "normalizer", settings.revision, env)
        saved, _, _ = await read_last_event(
            bus, LEDGER, state, StateSnapshot, lambda one: one.stage == "normalizer", newer="skip"
        )
        cursors = [
            event.commit.cursors if event is not None else {},
            saved.cursors if saved is not None else {},
        ]
        needed.append(max(one.get(ROLLOUTS, 1) for one in cursors))
    return min(needed)


async def _training(
    bus: NatsBus, settings: RecoverySettings, entry: LedgerEntry | None, trimmed: dict[str, int], *, is_here: bool
) -> tuple[CheckpointChange | None, TrainReport | None, PolicyRecord | None, list[str]]:
    """Return the checkpoint to go back to, if any, the report and the policy to delete, and damaged checkpoints.

    `is_here`: the trainer has no checkpoints elsewhere, whatever its report says. Each damaged checkpoint comes with
    what is wrong with it.
    """
    run, trainer, folder = settings.run, settings.trainer, settings.folder / CHECKPOINTS
    subject = subjects.state(run, "trainer", subjects.LIVE, trainer)
    report, _, _ = await read_last_event(bus, LEDGER, subject, TrainReport, lambda one: one.run == run)
    if not settings.trains or not (is_here or _is_ours(settings, folder, report)):
        return None, None, None, []
    try:
        path = latest_checkpoint(folder)
    except CheckpointError:
        path = None
    chosen, faults = await _known_checkpoint(bus, settings, path)
    name, state = (chosen[0].name, chosen[1]) if chosen is not None else (None, None)
    step = state.step if state is not None else 0
    stale = report is not None and (
        state is None or report.step > step or (report.step == step and report.policy_version != state.policy_version)
    )
    previous = path.name if path is not None else None
    change = None
    if name != previous or stale:
        steps = [one.step for one in (report,) if one is not None]
        steps += [one.step for _, one in known_checkpoints(folder) if path is not None]
        change = CheckpointChange(from_step=max([step, *steps]), step=step, name=name, previous=previous)
        await _check_payloads(bus, settings, state, trimmed)
    policy = await _policy(bus)
    if policy is not None and (entry is not None or not policy.policy_version.step):
        policy = None
    return change, report if stale else None, policy, faults


async def _reports_read(bus: NatsBus, settings: RecoverySettings) -> list[int]:
    """Return the sequences of trainer reports that are the newest LEDGER message that some stage read."""
    subject = subjects.state(settings.run, "trainer", subjects.LIVE, settings.trainer)
    named = {marks[LEDGER].seq for _, marks in await stage_marks(bus, settings) if LEDGER in marks}
    found = []
    for seq in sorted(named):
        with suppress(NotFoundError):
            if (await bus.get_head(LEDGER, seq)).subject == subject:
                found.append(seq)
    return found


async def _elsewhere(bus: NatsBus, settings: RecoverySettings) -> str | None:
    """Return the checkpoint that the trainer reported last, if the trainer does not keep its checkpoints here."""
    subject = subjects.state(settings.run, "trainer", subjects.LIVE, settings.trainer)
    report, _, _ = await read_last_event(bus, LEDGER, subject, TrainReport, lambda one: one.run == settings.run)
    if not settings.trains or report is None or _is_ours(settings, settings.folder / CHECKPOINTS, report):
        return None
    return f"{report.checkpoint}, of step {report.step}"


def _is_ours(settings: RecoverySettings, folder: Path, report: TrainReport | None) -> bool:
    """Whether the trainer keeps its checkpoints in the run's folder on this machine."""
    here = folder.is_dir() or settings.has_own_server
    return here and (report is None or Path(report.checkpoint).parent.name == CHECKPOINTS)


async def _known_checkpoint(
    bus: NatsBus, settings: RecoverySettings, path: Path | None
) -> tuple[tuple[Path, TrainerState] | None, list[str]]:
    """Return the newest whole checkpoint of the run's ledger, and what is wrong with those tried before it.

    The checkpoint at `path` is tried first.
    """
    faults: list[str] = []
    candidates = known_checkpoints(settings.folder / CHECKPOINTS)
    for found, state in sorted(candidates, key=lambda one: one[0] != path):
        try:
            await find_position(bus, settings.run, settings.trainer, state.position)
        except DamagedError:
            raise
        except LedgerError:
            continue
        try:
            await anyio.to_thread.run_sync(verify_sums, found)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        return (found, state), faults
    return None, faults


async def _check_payloads(
    bus: NatsBus, settings: RecoverySettings, state: TrainerState | None, trimmed: dict[str, int]
) -> None:
    """Raise `StartupError` if rollouts that have to be trained on again were trimmed."""
    position = state.position if state is not None else LedgerPosition()
    below = trimmed.get(ROLLOUTS, 1)
    async for entry in follow_ledger(bus, settings.run, settings.trainer, position, follow=False):
        if entry.batch is not None and (lowest := min(ref.seq for ref in entry.batch.groups)) < below:
            raise StartupError(
                f"run {settings.run} cannot go on: its newest checkpoint that the ledger knows is of step "
                f"{state.step if state is not None else 0}, but batch {entry.batch.number} after it needs rollout "
                f"{lowest}, and history was trimmed below {below}. Restore the store and the folder from a backup, or "
                "start a new run, and set its `model` to a checkpoint of this one"
            )


async def _policy(bus: NatsBus) -> PolicyRecord | None:
    try:
        entry = await bus.value(keys.POLICY)
        return decode(PolicyRecord, entry.value) if entry is not None else None
    except (DamagedError, SchemaError):
        return None  # the trainer writes it again
