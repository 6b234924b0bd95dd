"""Checks what the server stores: that it and this build can read it, and that the ledger is whole."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.common.doctor_finding import DoctorFinding, fail, ok, warn
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, LedgerError, NotFoundError, StartupError
from lachesis.pipeline.health.ledger_reader import LEDGER_REPAIR_HINT, LedgerReader
from lachesis.pipeline.ledger.evidence import check_evidence
from lachesis.pipeline.retention.recovery_plan import make_plan
from lachesis.pipeline.retention.recovery_record import describe_unnoted
from lachesis.pipeline.runtime.retention_record import read_record
from lachesis.schemas import keys
from lachesis.schemas.errors import DataError
from lachesis.schemas.subjects import LEDGER, stream_name
from lachesis.services.output import human_bytes
from lachesis.services.preflight.newer_messages import check_versions
from lachesis.services.run.store import describe_unknown_history
from lachesis.services.run.unusable_states import find_unusable
from lachesis.services.stage_settings import ledger_settings, recovery_settings

__all__ = ["check_fit", "check_ledger"]

_MAX_REPORTED = 3


async def check_ledger(
    bus: NatsBus, config: RunConfig, streams: Mapping[str, dict[str, Any]]
) -> AsyncIterator[DoctorFinding]:
    """Yield findings. `streams`: the server's answers by the stream's name, as far as they exist."""
    for name, info in streams.items():
        lost = (info["state"].get("lost") or {}).get("bytes", 0)
        if lost:
            text = f"the server could not read {human_bytes(lost)} of the store when it started: what it held is gone"
            yield fail(f"stream {name}", text, "look at its log and its disk, and restore the store from a backup")
    if stream_name(config.run, LEDGER) not in streams:
        return
    async for newer in check_versions(bus, config):
        yield newer
    async for unfit in check_fit(bus, config):
        yield unfit
    reader = LedgerReader(bus, config.run, config.training.name)
    try:
        problems = [problem.text for problem in await reader.verify_new_entries() if problem.breaks]
        await check_evidence(bus, ledger_settings(config), is_empty=not reader.entries)
    except LedgerError as error:
        problems = [str(error)]
    except (InfrastructureError, DataError) as error:
        yield warn("ledger", f"not verified: {error}", "look again when the server answers")
        return
    if problems:
        more = f"; and {len(problems) - _MAX_REPORTED} more" if len(problems) > _MAX_REPORTED else ""
        yield fail("ledger", "; ".join(problems[:_MAX_REPORTED]) + more, LEDGER_REPAIR_HINT)
    elif reader.audit is not None and reader.entries:
        position = reader.audit.position
        yield ok("ledger", f"{position.entries} entries follow one another, the last is {position.digest[:12]}")


async def check_fit(bus: NatsBus, config: RunConfig) -> AsyncIterator[DoctorFinding]:
    """Yield what of the run's streams, bucket and checkpoints does not fit the rest."""
    check = "streams fit each other"
    try:
        if (unknown := await describe_unknown_history(bus, config)) is not None and config.path.is_dir():
            yield warn(
                check,
                unknown,
                f"where steps were trained, `lachesis up` refuses it; lachesis runs recover {config.run} takes it over",
            )
        plan = await make_plan(bus, recovery_settings(config), "doctor", await find_unusable(bus, config))
        record = await read_record(bus, config.run)
    except NotFoundError:
        return  # streams are missing, which is said elsewhere
    except (InfrastructureError, DataError, LedgerError) as error:
        yield warn(check, f"not known: {error}", "look again when the server answers")
    except StartupError as error:
        yield fail(check, str(error), "as it says")
    else:
        mend = f"lachesis runs recover {config.run}, or restore store and folder from a backup of one moment"
        for problem in plan.problems if plan is not None else []:
            yield fail(check, problem, mend)
        if record.swept:
            yield warn(
                check,
                f"messages that are gone from within {' and '.join(record.swept)} are not missed: so many loose "
                f"chunks of large messages were deleted there that the key {keys.RETENTION!r} lists them no more",
                "where no producer was killed time and again while it stored large messages, somebody has the "
                "governor's or the operator's key: make new ones",
            )
        if config.path.is_dir() and (unnoted := describe_unnoted(record, config.path)) is not None:
            yield warn(
                check,
                unnoted,
                "if the run was recovered with another folder, put that one's files of recoveries there; else somebody "
                "has the governor's or the operator's key: make new ones, and restore a backup",
            )
