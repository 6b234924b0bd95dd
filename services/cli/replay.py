"""`lachesis replay`: what to score again, how fast, and how it goes."""

import sys
from collections.abc import Sequence
from typing import Annotated

import anyio
import typer

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.offline.replay.logic.fold import FoldCommit
from lachesis.pipeline.offline.replay.pace import ReplayPace
from lachesis.pipeline.offline.replay.scoring import collect_seldom
from lachesis.pipeline.offline.replay.stage import ReplayProgress, ReplayRequest, run_replay
from lachesis.schemas.replay import UnscoredGroup
from lachesis.services.cli.history_options import SelectionOptions, with_selection
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.cli.progress import PAUSED, bar, drain_on_signal
from lachesis.services.output import print_json, printable
from lachesis.services.run.connect import open_history
from lachesis.services.run.lost_history import warn_of_losses

__all__ = ["replay"]

_MAX_REASONS = 5
"""Groups for which the reason of a missing score is shown."""


@with_options
@with_selection
def replay(
    options: Options,
    wanted: SelectionOptions,
    *,
    revision: Annotated[str, typer.Option(metavar="NAME", help="Name of the new revision.")],
    max_rate: Annotated[float | None, typer.Option(min=0.001, help="Groups a second at most.")] = None,
    max_inflight: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Groups in flight: read, but not yet written. Default: 32 a worker if raters are asynchronous, "
            "else 512.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes that read and score.")] = 1,
    as_json: Json = False,
) -> None:
    """Score history again as a new revision, with the raters and settings of --config and --set.

    The live run is not touched. After Ctrl-C or a crash the same command goes on where it was. Compare the result
    with `lachesis compare live NAME`.
    """
    pace = ReplayPace(max_rate=max_rate, max_inflight=max_inflight, workers=workers)
    config = options.config_with_environments()
    selection, groups = wanted.selection(config)
    request = ReplayRequest(revision=revision, selection=selection, groups=groups, pace=pace)
    collect_seldom()
    reasons: list[UnscoredGroup] = []
    result = anyio.run(_run, config, request, reasons)
    if as_json:
        print_json(result)
    else:
        _print_summary(result, reasons)
    if not result.finished:
        raise typer.Exit(PAUSED)


async def _run(config: RunConfig, request: ReplayRequest, reasons: list[UnscoredGroup]) -> ReplayProgress:
    draining = anyio.Event()

    def note(_env: str, _reached: int, folded: FoldCommit) -> None:
        reasons.extend(folded.unscored[: _MAX_REASONS - len(reasons)])

    async with (
        open_history(config, f"{config.run}.replay", OPERATOR) as bus,
        anyio.create_task_group() as tasks,
    ):
        await warn_of_losses(bus, config)
        tasks.start_soon(drain_on_signal, draining, draining.set)
        with bar(f"replay {request.revision}") as advance:
            result = await run_replay(
                bus, config, request, draining=draining, progress=advance, observe=note, connection=bus.connection
            )
        tasks.cancel_scope.cancel()
    return result


def _print_summary(result: ReplayProgress, reasons: Sequence[UnscoredGroup]) -> None:
    rate = f"{result.seconds:.1f} s"
    print(f"revision {result.revision}: {result.groups} of {result.total} groups, {rate}, digest {result.digest}")
    if result.unscored:
        print(f"not scored: {result.unscored} groups")
        for one in reasons:
            print(f"  {one.group}: {printable(one.reason)}")
        if result.unscored > len(reasons):
            print("  ...")
    if not result.finished:
        print("paused: the same command continues from here. Its history may be trimmed meanwhile", file=sys.stderr)
