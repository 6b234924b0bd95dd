"""Makes a run go on whose store lost history, by one command: shown, confirmed, done under its locks."""

import time
from collections.abc import Callable

import anyio

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import HistoryLostError, NotFoundError, StartupError
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS
from lachesis.pipeline.retention.recovery import apply_plan, read_unfinished
from lachesis.pipeline.retention.recovery_plan import UnusableState, make_plan
from lachesis.pipeline.retention.recovery_record import RecoveryPlan
from lachesis.pipeline.runtime.lost_streams import find_streams
from lachesis.pipeline.runtime.store_marks import read_marks
from lachesis.pipeline.runtime.stream_marks import MAX_LOST
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import BUCKET, STREAMS, stream_name
from lachesis.services.run.connect import SILENCE_S, open_run
from lachesis.services.run.store import (
    describe_unknown_history,
    find_lost_store,
    make_streams,
    refuse_foreign_folder,
    ways_out,
)
from lachesis.services.run.supervisor_lease import RunLease, lock_folder
from lachesis.services.run.unusable_states import find_unusable
from lachesis.services.stage_settings import recovery_settings

__all__ = ["recover_run"]

_MAX_ROUNDS = 4
"""Recoveries in a row; each is shown and confirmed. If more is wrong after the last, that is an error."""
_RECONNECT_S = 2.0
"""Seconds in which services that outlived their supervisor connect to a server that is started in its place."""


async def recover_run(
    config: RunConfig, confirm: Callable[[RecoveryPlan, bool], bool], *, from_first_model: bool = False
) -> tuple[RecoveryPlan | None, str | None]:
    """Recover a run until all fits, if `confirm` says so.

    `confirm` gets the plan and whether it was begun before.

    Return the last plan, None if all fits, and the file that keeps what was replaced, None if nothing was done.
    `from_first_model`: training may start over though steps were taken, since no checkpoint is left.

    Raises `ConfigError` where the run goes on, `NotFoundError` where there is none, `StartupError` where it cannot be
    recovered, or `confirm` refuses what is left after a first recovery.
    """
    if not config.path.is_dir():
        raise NotFoundError(f"there is no run {config.run}: no folder {config.path}")
    refuse_foreign_folder(config)
    plan: RecoveryPlan | None = None
    done: str | None = None
    with lock_folder(config.path, config.run):
        async with open_run(config, f"{config.run}.recover", OPERATOR) as history, background() as tasks:
            await _check_over(history.bus, config)
            lost, gone = await _find_lost(history.bus, config)
            unknown = await describe_unknown_history(history.bus, config)
            lease = RunLease(history.bus, config.run, config.path, tasks.cancel_scope.cancel)
            so_far: str | None = None
            if lost is not None and gone:
                plan = RecoveryPlan(run=config.run, id=_name(0), problems=[lost], makes=gone)
                if not confirm(plan, False):
                    return plan, None
                await _make_lost_streams(history.bus, config, lost)
                so_far = f"empty streams were made in place of {', '.join(gone)}"
            await lease.acquire()
            async with lease.held():
                settings = recovery_settings(config)
                for number in range(_MAX_ROUNDS + 1):  # what was lost may have hidden what a service cannot use
                    unfinished = read_unfinished(config.path)
                    unusable = await find_unusable(history.bus, config) if unfinished is None else UnusableState()
                    unusable = unusable._replace(from_first_model=from_first_model and not number)
                    more = [text for text in (lost, unknown) if text is not None and not number]
                    unusable = unusable._replace(problems=[*more, *unusable.problems])
                    found = unfinished or await make_plan(history.bus, settings, _name(number), unusable)
                    if found is None:
                        break
                    if number == _MAX_ROUNDS:
                        raise _not_recovered(config, so_far, f"now this is wrong: {found.problems[0]}")
                    if found is not unfinished and not from_first_model:
                        _refuse_first_model(config, found)
                    plan = found
                    if not confirm(found, unfinished is not None):
                        if so_far is not None:
                            raise _not_recovered(config, so_far, "the rest was not confirmed")
                        break
                    done = str(await apply_plan(history.bus, settings, found))
                    so_far = f"{done} keeps what was replaced so far"
                    await make_streams(history.bus, config, takes_over=True)  # the folder remembers them from now on
    return plan, done


def _name(number: int) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + (f".{number}" if number else "")


def _not_recovered(config: RunConfig, so_far: str | None, left: str) -> StartupError:
    return StartupError(
        f"run {config.run} is not recovered yet: {so_far}, and {left}. Repeat `lachesis runs recover {config.run}`"
    )


async def _find_lost(bus: NatsBus, config: RunConfig) -> tuple[str | None, list[str]]:
    """Return what the server lost of the run's streams, None if nothing, and the streams that are not there.

    Changes nothing. Raises `HistoryLostError` where nothing is left.
    """
    lost = await find_lost_store(bus, config)
    if lost is None:
        return None, []
    if not lost.is_partial:
        raise HistoryLostError(f"{lost.text}. Nothing was changed. {lost.mend}")
    found = await find_streams(bus)
    return lost.text, [stream_name(config.run, kind) for kind in (BUCKET, *STREAMS) if kind not in found]


async def _make_lost_streams(bus: NatsBus, config: RunConfig, lost: str) -> None:
    """Make empty streams in place of those that the server lost.

    Until the recovery is done they count as lost. Raises `HistoryLostError` where a stream went too far for its
    sequences to be passed over.
    """
    await bus.ensure_streams(config.streams)
    ends = {stream: usage.last for stream, usage in (await find_streams(bus)).items()}
    for source, marks in await read_marks(bus, config.run, config.path):
        for stream, mark in marks.ends.items():
            if stream != BUCKET and mark.seq > ends.get(stream, 0) + MAX_LOST:
                raise HistoryLostError(
                    f"{lost}. {source} says that {stream} went to sequence {mark.seq}: so many cannot be passed "
                    f"over. {ways_out(config.run)}"
                )


def _refuse_first_model(config: RunConfig, plan: RecoveryPlan) -> None:
    """Raise `StartupError` if training would start over after steps were taken and the caller did not allow that."""
    change = plan.checkpoint
    if change is not None and change.name is None and change.from_step:
        reported = f" The trainer reported {plan.report.checkpoint}." if plan.report is not None else ""
        raise StartupError(
            f"run {config.run} has trained {change.from_step} steps, and no checkpoint in {config.path / CHECKPOINTS} "
            f"is one that it can go on from.{reported} Nothing was changed. Put the checkpoints there (from the "
            "trainer's machine or volume, or a backup) and repeat this; or, if none is left, repeat it with "
            "--from-first-model: training then begins with the run's first model, on the batches that the ledger "
            "holds; or begin another run (--run NAME) whose `model` is a checkpoint of this one"
        )


async def _check_over(bus: NatsBus, config: RunConfig) -> None:
    """Raise `ConfigError` where a service of the run is there, which a killed supervisor may have left."""
    with anyio.move_on_after(SILENCE_S + (_RECONNECT_S if config.nats is None else 0.0)):
        async with bus.listen(subjects.heartbeat(config.run)) as beats:
            beat = await anext(aiter(beats))
            raise ConfigError(f"run {config.run} goes on: its {beat.subject.split('.')[3]} is there. Stop it first")
