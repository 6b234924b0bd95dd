"""Checks that a ledger holds what was trained on it, before its writer adds to it.

A store that lost its newest entries answers like one that never had them. So the writer reads what refers to entries of
the ledger: the trainer's report, its newest checkpoint and, if there is no ledger at all, the published policy. If the
ledger lacks an entry that these name, nothing is written: otherwise a second history would begin.
"""

from pathlib import Path

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.errors import CheckpointError, DamagedError, HistoryLostError, LedgerError
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.checkpoint_state import (
    CHECKPOINTS,
    POINTER,
    known_checkpoints,
    latest_checkpoint,
    state_of,
)
from lachesis.pipeline.ledger.reader import find_position
from lachesis.pipeline.ledger.settings import LedgerSettings
from lachesis.pipeline.runtime.stream_marks import recovery_hint
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import TrainReport

__all__ = ["check_evidence", "describe_known_checkpoint"]

_NEW_RUN = "start a new run, and set its `model` to a checkpoint of this one if you like"


async def check_evidence(bus: Bus, settings: LedgerSettings, *, is_empty: bool) -> None:
    """Raise `HistoryLostError` if the live trainer's ledger lacks entries that are named.

    `is_empty`: the ledger has no entry.

    Raises `DamagedError` if the record that would name them is damaged itself.
    """
    run, trainer, folder = settings.run, settings.trainer, settings.folder / CHECKPOINTS
    report = await _report(bus, run, trainer)
    named = [(f"the trainer's report of step {report.step}", _reported(report))] if report else []
    saved = _newest_checkpoint(folder)
    if saved is not None:
        named.append(saved)
    for source, position in named:
        try:
            await find_position(bus, run, trainer, position)
        except LedgerError as error:
            raise HistoryLostError(
                f"{source} is of a ledger that is not there: {error}. {recovery_hint(run)}: "
                f"{await describe_known_checkpoint(bus, run, trainer, folder, report)}; or {_NEW_RUN}"
            ) from error
    if is_empty:
        await _check_policy(bus, run)


async def describe_known_checkpoint(bus: Bus, run: str, trainer: str, folder: Path, report: TrainReport | None) -> str:
    """Say which checkpoint in `folder` the ledger still knows.

    Only the steps after it are lost.
    """
    for path, state in known_checkpoints(folder):
        try:
            await find_position(bus, run, trainer, state.position)
        except LedgerError:
            continue
        if report is None or report.step <= state.step:
            return (
                f"to go back to step {state.step}, which this ledger knows, write {path.name!r} into {folder / POINTER}"
            )
    return f"no checkpoint in {folder} is one that this ledger knows"


async def _report(bus: Bus, run: str, trainer: str) -> TrainReport | None:
    subject = subjects.state(run, "trainer", subjects.LIVE, trainer)
    report, _, _ = await read_last_event(
        bus, subjects.LEDGER, subject, TrainReport, lambda one: (one.run, one.trainer) == (run, trainer)
    )
    return report


def _reported(report: TrainReport) -> LedgerPosition:
    return LedgerPosition(report.ledger_index + 1, report.chain)


def _newest_checkpoint(folder: Path) -> tuple[str, LedgerPosition] | None:
    """Return the checkpoint that the trainer will go on with, if its folder is on this machine."""
    try:
        path = latest_checkpoint(folder)
    except CheckpointError:
        return None  # the trainer refuses to start, and says how to fix it
    state = state_of(path) if path else None
    return (f"checkpoint {path}", state.position) if state else None


async def _check_policy(bus: Bus, run: str) -> None:
    """Raise `HistoryLostError` if steps were taken and no trainer of the run has a ledger."""
    if (await bus.extent(subjects.LEDGER, subjects.ledger(run, "*"))).messages:
        return
    try:
        entry = await bus.value(keys.POLICY)
        step = decode(PolicyRecord, entry.value).policy_version.step if entry else 0
    except (DamagedError, SchemaError):
        return  # unreadable; the trainer, which writes it, corrects it
    if step:
        raise HistoryLostError(
            f"run {run} has published weights of step {step}, but stream {subjects.LEDGER} holds no ledger of it: its "
            f"history was lost. {recovery_hint(run)}; or {_NEW_RUN}"
        )
