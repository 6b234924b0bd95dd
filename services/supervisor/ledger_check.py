"""Verifies a run's ledger once, at its end, and that the server could read all of its rollouts.

A run whose ledger is broken, or that lost rollouts, has not gone well, however it ended.
"""

import logging

import anyio

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import HistoryLostError, InfrastructureError, LedgerError, NotFoundError
from lachesis.pipeline.health.ledger_reader import LEDGER_REPAIR_HINT, LedgerReader
from lachesis.pipeline.ledger.evidence import check_evidence
from lachesis.pipeline.runtime.stream_marks import describe_lost_bytes
from lachesis.schemas.errors import DataError
from lachesis.schemas.subjects import ROLLOUTS
from lachesis.services.stage_settings import ledger_settings

__all__ = ["verify_ledger"]

log = logging.getLogger("lachesis")

_ANSWER_S = 5.0
_VERIFY_S = 60.0
"""How long it may take, once the server answers."""
_MAX_REPORTED = 3


async def verify_ledger(bus: Bus, config: RunConfig, found: str) -> None:
    """Raise `LedgerError` if the ledger is broken or the server could not read all rollouts.

    `found`: what the health service found while the run went on.
    """
    reader = LedgerReader(bus, config.run, config.training.name)
    problems: list[str] = []
    lost: str | None = None
    try:
        with anyio.fail_after(_ANSWER_S):  # an unavailable server is not waited for
            lost = describe_lost_bytes({ROLLOUTS: (await bus.usage(ROLLOUTS)).lost_bytes})
        with anyio.fail_after(_VERIFY_S):
            problems = [problem.text for problem in await reader.verify_new_entries() if problem.breaks]
            if not problems and not found:
                await check_evidence(bus, ledger_settings(config), is_empty=not reader.entries)
    except (TimeoutError, InfrastructureError, NotFoundError, DataError) as error:
        log.warning("the ledger was not verified: %s; `lachesis doctor` does it", str(error) or "no answer in time")
    if problems or found:
        more = f"; and {len(problems) - _MAX_REPORTED} more" if len(problems) > _MAX_REPORTED else ""
        said = "; ".join(problems[:_MAX_REPORTED]) + more if problems else found
        raise LedgerError(f"the ledger is broken: {said}. {LEDGER_REPAIR_HINT}")
    if lost is not None:
        raise HistoryLostError(lost)
