"""A service: it counts the groups in ROLLOUTS, and writes their number to the run's folder."""

from collections.abc import Iterator

import msgspec

from lachesis.pipeline.access import Access, Scope, service_access
from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.subjects import ROLLOUTS
from lachesis_orchard.config import settings_of

FILE = "basket.json"


def processes(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the service and the part of each process that the run has."""
    if settings_of(config).basket:
        yield "basket", ""


def access(scope: Scope) -> dict[str, Access]:
    """Return what the service may do: read ROLLOUTS."""
    return {"basket": service_access(scope, "basket", is_single=True, reads=(ROLLOUTS,))}


async def run_basket(service: Service, config: RunConfig) -> None:
    """Count until the service drains."""
    counted = 0
    wanted = [subjects.rollout(service.run)]
    async with service.until_drained(), service.bus.read(ROLLOUTS, wanted, headers_only=True) as groups:
        service.mark_ok()
        async for _ in groups:
            counted = min(counted + 1, settings_of(config).size)
            service.vitals.metrics["basket/groups"] = float(counted)
            replace_file(config.path / FILE, msgspec.json.encode({"groups": counted}))
