"""Opens what a service's process exports: traces and metrics over OTLP, on the NATS server's clock."""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, StartupError
from lachesis.pipeline.telemetry.clock import Clock
from lachesis.pipeline.telemetry.tracing import Tracing
from lachesis.schemas import subjects

__all__ = ["follow_clock", "open_tracing"]

log = logging.getLogger("lachesis")

_MACHINE_ID = Path("/etc/machine-id")
_CLOCK_S = 30.0
_CLOCK_REQUESTS = 5
"""Exchanges with the server of which the quickest counts."""


@contextmanager
def open_tracing(config: RunConfig, name: str, replica: str) -> Iterator[Tracing]:
    """Yield what the service `name` knows of traces.

    What is left is exported at the end, within `close_s` seconds.

    Raises `StartupError` if an export is requested and its packages are missing, `ConfigError` as `open_otlp`.
    """
    if not config.telemetry.wanted():
        yield Tracing()
        return
    try:
        from lachesis.pipeline.telemetry.otlp import open_otlp
    except ModuleNotFoundError as error:
        raise StartupError(
            f"telemetry needs the package {error.name!r}: {install_command('otel')}, or unset telemetry.endpoint "
            "and OTEL_EXPORTER_OTLP_ENDPOINT"
        ) from error
    resource = {
        "service.name": subjects.service_name(name),
        "service.namespace": "lachesis",
        "service.instance.id": f"{config.run}.{name}.{replica}",
        "host.name": socket.gethostname(),
        "rl.run": config.run,
    }
    service, _, part = name.partition("-")
    if service == subjects.ENVIRONMENT and part:
        resource["rl.env.name"] = part
    if _MACHINE_ID.is_file():
        resource["host.id"] = _MACHINE_ID.read_text().strip()
    otlp = open_otlp(config.telemetry, resource)
    try:
        yield Tracing(config.telemetry, otlp)
    finally:
        if otlp is not None:
            otlp.close()


async def follow_clock(bus: Bus, clock: Clock) -> None:
    """Keep `clock` on the server's time, measured again every half minute."""
    while True:
        found = []
        for _ in range(_CLOCK_REQUESTS):
            sent_ns = time.perf_counter_ns()
            try:
                server_ns = await bus.server_time_ns()
            except InfrastructureError:
                continue  # the server is unavailable: the last measurement stays good for long
            found.append((time.perf_counter_ns() - sent_ns, sent_ns, server_ns))
        if found:
            took_ns, sent_ns, server_ns = min(found)
            clock.measured(sent_ns, sent_ns + took_ns, server_ns)
        await sleep_until_tick(_CLOCK_S)
