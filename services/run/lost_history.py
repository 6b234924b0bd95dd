"""Reports to a reader of a run's history which parts the server lost: no hole is skipped silently."""

import logging

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, LedgerError, NotFoundError
from lachesis.pipeline.ledger.rollbacks import find_contradictions
from lachesis.pipeline.runtime.retention_record import read_record
from lachesis.pipeline.runtime.stream_marks import describe_lost_bytes
from lachesis.schemas.errors import DataError
from lachesis.schemas.subjects import STREAMS
from lachesis.services.stage_settings import ledger_settings

__all__ = ["warn_of_losses"]

log = logging.getLogger("lachesis")


async def warn_of_losses(bus: NatsBus, config: RunConfig) -> None:
    """Log what is missing of the run's history, and goes missing from whatever is made of it."""
    try:
        for one in await find_contradictions(bus, ledger_settings(config), folder=config.path):
            log.warning("history is missing: %s; `lachesis runs recover %s` says what", one, config.run)
        for stream, ranges in (await read_record(bus, config.run)).lost.items():
            for lost in ranges:
                log.warning("history is missing: sequences %d to %d of %s were lost by the server, and the run was "
                            "recovered", lost.first, lost.last, stream)  # fmt: skip
        usage = {stream: (await bus.usage(stream)).lost_bytes for stream in STREAMS}
    except NotFoundError:
        return  # there is no history yet, which is said elsewhere
    except (DataError, InfrastructureError, LedgerError) as error:
        log.warning("whether history is missing is not known: %s", error)
        return
    if (text := describe_lost_bytes(usage)) is not None:
        log.warning("history is missing: %s", text)
