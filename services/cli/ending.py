"""Follows a run until it ends or the command is stopped, also while its server is unavailable."""

import sys
from collections.abc import Awaitable, Callable

import anyio

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.stop_signals import stop_signals
from lachesis.pipeline.config.run import RunConfig
from lachesis.services.run.connect import RunHistory, has_ended, open_run, until_ended

__all__ = ["end_on_signal", "follow_run"]

_PATIENCE_S = 5.0
"""A server that is unavailable for less is not reported: a run that ends stops its own server."""


async def follow_run(config: RunConfig, name: str, show: Callable[[RunHistory], Awaitable[None]]) -> None:
    """Let `show` follow the run until the run ends, or until SIGINT or SIGTERM.

    Of a run that has `ended` already it is to show what there is of it. That a run has ended, and that its server is
    away, is said on standard error; after an absence readers go on from where they were. Raises as `open_run`.
    """
    async with background() as watching:
        watching.start_soon(end_on_signal, watching.cancel_scope)
        async with open_run(config, name) as (bus, ended):
            if ended or await has_ended(bus, config):
                _print_note(f"run {config.run} has ended; this is what there is of it")
                await show(RunHistory(bus, ended=True))
                return
            async with background() as tasks:
                tasks.start_soon(_end_with_run, bus, config, tasks.cancel_scope)
                tasks.start_soon(_report_absence, bus, config.run)
                tasks.start_soon(bus.keep_served)
                await show(RunHistory(bus, ended=False))


async def end_on_signal(scope: anyio.CancelScope) -> None:
    """Cancel on SIGINT or SIGTERM, which is how one stops looking."""
    with anyio.open_signal_receiver(*stop_signals()) as signals:
        async for _ in signals:
            scope.cancel()


async def _end_with_run(bus: NatsBus, config: RunConfig, scope: anyio.CancelScope) -> None:
    await until_ended(bus, config)
    _print_note(f"run {config.run} has ended")
    scope.cancel()


async def _report_absence(bus: NatsBus, run: str) -> None:
    """Say when the server is unavailable, and when it is back."""
    while True:
        await bus.until_down()
        with anyio.move_on_after(_PATIENCE_S) as patience:
            await bus.until_up()
        if patience.cancelled_caught:
            _print_note(f"the server of run {run} is unavailable; waiting for it")
            await bus.until_up()
            _print_note(f"the server of run {run} is back")


def _print_note(text: str) -> None:
    """Say something beside the output."""
    print(f"lachesis: {text}", file=sys.stderr, flush=True)
