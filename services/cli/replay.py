"""`lachesis replay`: what to score again, how fast, and how it goes."""

import sys

import anyio
import typer

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.replay.config import Pace
from lachesis.pipeline.replay.judging import collect_seldom
from lachesis.pipeline.replay.stage import Replayed, Request, run_replay
from lachesis.schemas.access import OPERATOR
from lachesis.services.cli.options import Options
from lachesis.services.cli.output import print_json
from lachesis.services.cli.progress import PAUSED, bar, drain_when_told
from lachesis.services.cli.selection import Wanted
from lachesis.services.connect import open_history

__all__ = ["replay_history"]


def replay_history(options: Options, revision: str, wanted: Wanted, pace: Pace, *, as_json: bool) -> None:
    """Score the selection under `revision`. Exits with 130 when it was interrupted; the same command goes on."""
    config = options.config_with_environments()
    selection, groups = wanted.selection(config)
    request = Request(revision=revision, selection=selection, groups=groups, pace=pace)
    collect_seldom()
    result = anyio.run(_run, config, request)
    if as_json:
        print_json(result)
    else:
        _tell(result)
    if not result.finished:
        raise typer.Exit(PAUSED)


async def _run(config: RunConfig, request: Request) -> Replayed:
    draining = anyio.Event()
    async with (
        open_history(config, f"{config.run}.replay", OPERATOR) as bus,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(drain_when_told, draining, draining.set)
        with bar(f"replay {request.revision}") as tell:
            result = await run_replay(bus, config, request, draining=draining, progress=tell, connection=bus.connection)
        tasks.cancel_scope.cancel()
    return result


def _tell(result: Replayed) -> None:
    rate = f"{result.seconds:.1f} s"
    print(f"revision {result.revision}: {result.groups} of {result.total} groups, {rate}, digest {result.digest}")
    if result.unscored:
        print(f"{result.unscored} groups could not be scored; `lachesis tail rl.replay.rescore.>` shows why")
    if not result.finished:
        print("paused: the same command goes on from here. Its history may be trimmed meanwhile", file=sys.stderr)
