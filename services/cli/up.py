"""`lachesis up`: the supervisor in the foreground, what it started and how far it is, in plain lines."""

import logging
import shlex
import signal
import sys

import anyio
import anyio.to_thread

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.late_output import keep_output
from lachesis.services.cli.options import Options
from lachesis.services.live.progress import newest_checkpoint, newest_figures, progress_line
from lachesis.services.preflight import check_named
from lachesis.services.supervisor import Supervisor

__all__ = ["run_up", "stop_on_signals"]

log = logging.getLogger("lachesis")

_PROGRESS_S = 10.0


def run_up(options: Options) -> None:
    """Run until told to stop or until the run is finished. Raises `ConfigError`, `StartupError`."""
    keep_output()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = options.config()
    check_named(config)
    anyio.run(_up, config, options.arguments())


async def _up(config: RunConfig, arguments: list[str]) -> None:
    supervisor = Supervisor(config, arguments)
    print(f"run {config.run} in {config.path}; logs in {supervisor.logs}", flush=True)
    print(f"watch it from another terminal: {shlex.join(['lachesis', 'top', *arguments])}", flush=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_on_signals, supervisor)
        tasks.start_soon(_tell_progress, config)
        for row in supervisor.running:
            tasks.start_soon(_announce, supervisor, row.planned.name)
        await supervisor.run()
        tasks.cancel_scope.cancel()
    checkpoint = newest_checkpoint(config.path)
    if checkpoint is not None:
        print(f"the trained model: {checkpoint}", flush=True)


async def _tell_progress(config: RunConfig) -> None:
    """Print a line every few seconds while steps are taken."""
    told = newest_figures(config.path)
    while True:
        await anyio.sleep(_PROGRESS_S)
        figures = await anyio.to_thread.run_sync(newest_figures, config.path)
        if figures != told and "train/step" in figures:
            told = figures
            print(progress_line(figures, config.training.steps), flush=True)


async def _announce(supervisor: Supervisor, name: str) -> None:
    row = next(row for row in supervisor.running if row.planned.name == name)
    await row.ready.wait()
    if row.process is not None and not row.stopping:
        print(f"ready: {name}, pid {row.process.pid}, log {supervisor.logs / name}.log", flush=True)


async def stop_on_signals(supervisor: Supervisor) -> None:
    """Stop in order at the first SIGINT or SIGTERM, at once at the second."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            log.info("%s: stopping; once more to stop without draining", signal.Signals(number).name)
            supervisor.stop()
            break
        async for number in signals:
            log.warning("%s: killing every process", signal.Signals(number).name)
            supervisor.kill()
