"""Carries out a recovery (`recovery_plan`).

Guarantees that if a recovery is killed at any line, the next one completes it: the plan is in a file of the run's
folder before anything changes, each step may be repeated, and `lachesis up` refuses the run until the file is moved
away. Only the trainer's report and the policy record are deleted, if they contradict the ledger; the file keeps them.
"""

import logging
from contextlib import aclosing
from pathlib import Path

import msgspec

from lachesis.pipeline.bus.api import StoredMessage, StreamUsage
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.common.fsync import fsync, make_folder, replace_file
from lachesis.pipeline.errors import InfrastructureError, NotFoundError, StartupError
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, POINTER, write_pointer
from lachesis.pipeline.ledger.rollbacks import RECOVERY_FILE, find_contradictions
from lachesis.pipeline.retention.holds import update_record
from lachesis.pipeline.retention.other_copies import read_saved_rollouts, save_other_copies
from lachesis.pipeline.retention.recovery_plan import copied_ends
from lachesis.pipeline.retention.recovery_record import RECOVERIES, RecoveryPlan, StreamLoss, add_to_record
from lachesis.pipeline.retention.settings import RecoverySettings
from lachesis.pipeline.runtime.store_marks import MARKS_FILE, MarkWriter, describe_contradictions
from lachesis.schemas import keys, subjects
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.subjects import BUCKET, LEDGER, ROLLOUTS, kind_of
from lachesis.schemas.values import from_json

__all__ = ["apply_plan", "read_unfinished"]

log = logging.getLogger("lachesis")

_FILLERS_AT_ONCE = 1000
"""Fillers that are sent before the server says that it stored them; it drops what is much more than that."""
_RESCORED = ("scorer", "teacher")


def read_unfinished(folder: Path) -> RecoveryPlan | None:
    """Return the recovery that was begun and not completed; None if there is none. Raises `StartupError`."""
    file = folder / RECOVERY_FILE
    try:
        return from_json(RECOVERY_FILE, RecoveryPlan, file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, SchemaError) as error:
        raise StartupError(f"{file} cannot be read, and says what a recovery was doing: {error}") from error


async def apply_plan(bus: NatsBus, settings: RecoverySettings, plan: RecoveryPlan) -> Path:
    """Carry out a plan, or the rest of it, and return the file that records it."""
    folder = settings.folder
    _write(folder, plan)
    if plan.ends and plan.saved is None:
        plan = await _save_copies(bus, folder, plan)
    if plan.ends and not plan.has_new_copies:
        plan = await _renew_copies(bus, settings, plan)
    filled = [await _fill(bus, plan, loss) for loss in plan.losses]
    if filled != plan.losses:
        plan = msgspec.structs.replace(plan, losses=filled)
        _write(folder, plan)
    for seq in plan.copies:
        await _copy(bus, plan, seq)
    async with aclosing(read_saved_rollouts(bus, folder / RECOVERIES, plan.saved or [])) as saved:
        async for message in saved:
            await _store_again(bus, message, f"recovery.{plan.id}.saved.{message.seq}.{message.time_ns}")
    await _put_aside(bus, plan)
    await update_record(bus, plan.run, lambda old: add_to_record(old, plan))
    if plan.rescore_from is not None:
        there = await bus.consumer_names(ROLLOUTS)  # without the stream the server does not answer
        for durable in (subjects.durable(stage, plan.run, settings.revision) for stage in _RESCORED):
            if durable in there:
                await bus.rewind(ROLLOUTS, durable, plan.rescore_from)
    await _set_training_back(bus, settings, plan)
    marks = await MarkWriter.open(bus, plan.run, folder)
    await marks.write(None, now=True)
    replace_file(folder / MARKS_FILE, msgspec.json.encode(marks.newest))
    make_folder(folder / RECOVERIES)
    done = folder / RECOVERIES / f"{plan.id}.json"
    (folder / RECOVERY_FILE).rename(done)
    fsync(folder / RECOVERIES)
    fsync(folder)
    left = await find_contradictions(bus, settings, folder=folder)
    if left:  # more was lost meanwhile, or this plan was not enough
        raise StartupError(
            f"the recovery of run {plan.run} is not complete: {describe_contradictions(left)}. Repeat it; if it says "
            f"the same again, report this with {done}, and a backup of the store, or a new run, is the way on"
        )
    return done


def _write(folder: Path, plan: RecoveryPlan) -> None:
    replace_file(folder / RECOVERY_FILE, msgspec.json.format(msgspec.json.encode(plan)))


def _give_up(folder: Path) -> None:
    """Delete the plan, of which nothing was carried out that has to be completed."""
    (folder / RECOVERY_FILE).unlink()
    fsync(folder)


async def _save_copies(bus: NatsBus, folder: Path, plan: RecoveryPlan) -> RecoveryPlan:
    """Save what only other copies have. Nothing has been changed where that fails, so the plan is given up then."""
    try:
        saved = await save_other_copies(bus, list(plan.ends), folder / RECOVERIES, plan.id)
    except (ConfigError, InfrastructureError, StartupError):
        _give_up(folder)
        raise
    plan = msgspec.structs.replace(plan, saved=saved)
    _write(folder, plan)
    return plan


async def _renew_copies(bus: NatsBus, settings: RecoverySettings, plan: RecoveryPlan) -> RecoveryPlan:
    """Make each stream's copies again from the leader's: a copy could bring back what the leader lost.

    That deletes the other copies, whose own messages are saved before. So before each it is compared whether the copy
    that the plan was made for still leads: another one, shorter or not, may have lost nothing. Raises `StartupError` if
    it does not.
    """
    folder, replicas = settings.folder, {kind_of(one.name): one.replicas for one in await bus.describe_streams()}
    renewed: list[str] = []
    for stream in plan.ends:
        await _refuse_moved(bus, settings, plan, renewed)
        await bus.renew_copies(stream, max(settings.replicas, replicas.get(stream, 1)))
        renewed.append(stream)
    await _refuse_moved(bus, settings, plan, renewed)
    plan = msgspec.structs.replace(plan, has_new_copies=True)
    _write(folder, plan)
    return plan


async def _refuse_moved(bus: NatsBus, settings: RecoverySettings, plan: RecoveryPlan, renewed: list[str]) -> None:
    """Raise `StartupError`, and give the plan up, if another copy of a stream leads. `renewed`: those made again."""
    now = await copied_ends(bus, settings)
    moved = [name for name in plan.ends if name != BUCKET and name in now and not _is_as_planned(plan, name, now)]
    if not moved:
        return
    _give_up(settings.folder)
    changed = f" but that all copies of {', '.join(renewed)} are the same again" if renewed else ""
    raise StartupError(
        f"another copy of {', '.join(moved)} led in the cluster than when this recovery was planned: they end at "
        f"sequence {', '.join(str(now[name].last) for name in moved)} now. Nothing was changed{changed}. Repeat "
        f"`lachesis runs recover {plan.run}`, which looks again at what is missing"
    )


def _is_as_planned(plan: RecoveryPlan, stream: str, now: dict[str, StreamUsage]) -> bool:
    """Whether a stream ends where it did, with a message of the same time: two copies may be of the same length."""
    end = now[stream]
    return end.last == plan.ends[stream] and end.last_ns == plan.ended_ns.get(stream, end.last_ns)


async def _fill(bus: NatsBus, plan: RecoveryPlan, loss: StreamLoss) -> StreamLoss:
    """Store fillers until the stream goes beyond the lost messages; only the last filler stays.

    Return the loss up to where the fillers went: the server may store some after the end of the stream was read.
    """
    subject = subjects.fillers(plan.run).get(loss.stream)
    if subject is None:
        return loss
    while (last := (await bus.usage(loss.stream)).last) < loss.last:
        count = min(loss.last - last, _FILLERS_AT_ONCE)
        await bus.store_empty(subject, count - 1)
        await bus.publish(subject, b"", msg_id=f"recovery.{plan.id}.{loss.stream}.{last}.{count}")
    await bus.delete_all(loss.stream, [subject], keep=1)  # while one is stored, the stream cannot fall back behind it
    async with bus.read(loss.stream, [], start=loss.last + 1, headers_only=True, follow=False) as messages:
        async for message in messages:
            is_filler = message.subject == subject
            return msgspec.structs.replace(loss, last=message.seq) if is_filler else loss
    return loss


async def _put_aside(bus: NatsBus, plan: RecoveryPlan) -> None:
    """Delete the values of keys that their services cannot use; a value that was stored since then stays."""
    for key, value in plan.keys.items():
        entry = await bus.value(key)
        if entry is not None and entry.value == value:
            await bus.delete_all(BUCKET, [subjects.value_subject(plan.run, key)])


async def _copy(bus: NatsBus, plan: RecoveryPlan, seq: int) -> None:
    """Store a rollout again, under a sequence that nothing refers to yet.

    If it was lost since the plan was made, the next plan says so.
    """
    try:
        message = await bus.get(ROLLOUTS, seq)
    except NotFoundError as error:
        log.warning("rollout %d, which was to be stored again, is gone: %s", seq, error)
        return
    await _store_again(bus, message, f"recovery.{plan.id}.copy.{seq}")


async def _store_again(bus: NatsBus, message: StoredMessage, msg_id: str) -> None:
    headers = {name: value for name, value in message.headers.items() if not name.startswith("Nats-")}
    await bus.publish_large(message.subject, message.data, msg_id=msg_id, headers=headers)


async def _set_training_back(bus: NatsBus, settings: RecoverySettings, plan: RecoveryPlan) -> None:
    if plan.report is not None:
        await bus.delete_all(LEDGER, [subjects.state(plan.run, "trainer", subjects.LIVE, settings.trainer)])
    if plan.policy is not None:
        await bus.delete_all(BUCKET, [subjects.value_subject(plan.run, keys.POLICY)])
    if plan.checkpoint is None:
        return
    folder = settings.folder / CHECKPOINTS
    if plan.checkpoint.name is not None:
        write_pointer(folder, POINTER, plan.checkpoint.name)
    elif folder.is_dir():
        (folder / POINTER).unlink(missing_ok=True)
        fsync(folder)
