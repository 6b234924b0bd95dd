"""The life of a service's process: connect, announce, work, drain on SIGTERM or SIGINT, say clearly why it ended.

Exit codes: 0 drained, 1 a bug (traceback), 2 cannot start (the message says what to do), 3 fenced by another writer,
4 the drain took too long.
"""

import logging
import signal
import sys
from collections.abc import Callable

import anyio

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.stage.service import Service, open_service
from lachesis.schemas.errors import ConfigError, FencedError, LachesisError, StartupError
from lachesis.services.micro import micro_service
from lachesis.services.registry import Main, ServiceSpec, load_main

__all__ = ["DRAIN_TIMEOUT", "FENCED", "STARTUP", "run_process"]

STARTUP = 2
FENCED = 3
DRAIN_TIMEOUT = 4

log = logging.getLogger("lachesis")


def run_process(spec: ServiceSpec, config: RunConfig, part: str = "") -> int:
    """Run one service until it is told to stop, and return the exit code."""
    name = f"{spec.name}-{part}" if part else spec.name
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s %(levelname)s {name} %(message)s", force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return anyio.run(_run, spec, load_main(spec), config, name, part)
    except (LachesisError, BaseExceptionGroup) as error:
        return _explain(error)


def _explain(error: BaseException) -> int:
    """Log what ended the service and return the exit code: expected ends as one line each, bugs as a traceback."""
    leaves = _leaves(error)
    for kinds, code in (((FencedError,), FENCED), ((StartupError, ConfigError), STARTUP)):
        expected = [leaf for leaf in leaves if isinstance(leaf, kinds)]
        if expected and len(expected) == len(leaves):
            for leaf in expected:
                log.error("%s", leaf)
            return code
    log.error("ended by an unexpected error", exc_info=error)
    return 1


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


async def _run(spec: ServiceSpec, main: Main, config: RunConfig, name: str, part: str) -> int:
    async with (
        await connect(config.nats, name=f"{config.run}.{name}") as bus,
        open_service(bus, name, config.run, config.revision) as service,
        micro_service(bus, service, spec.about),
        anyio.create_task_group() as tasks,
    ):
        scope = tasks.cancel_scope
        late = False

        def on_late() -> None:
            nonlocal late
            late = True
            scope.cancel()

        tasks.start_soon(_drain_on_signal, service, config.services.drain_s, on_late)
        log.info("started, pid %s", service.instance.partition("-")[0])
        await main(service, config, part)
        scope.cancel()
    log.info("drained" if not late else "stopped: the drain took longer than %s s", *([config.services.drain_s] * late))
    return DRAIN_TIMEOUT if late else 0


async def _drain_on_signal(service: Service, deadline_s: float, on_late: Callable[[], None]) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("draining on %s", number.name)
            service.drain()
            await anyio.sleep(deadline_s)
            on_late()
