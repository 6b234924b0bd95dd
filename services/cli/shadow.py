"""`lachesis shadow`: runs a revision that follows the run in its own process, lists or ends them."""

import os
import sys
from typing import Annotated

import anyio
import msgspec
import typer

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, NotFoundError
from lachesis.pipeline.offline.compare.rolling import RollingFigures
from lachesis.pipeline.offline.replay.pace import ReplayPace
from lachesis.pipeline.offline.replay.revisions import following
from lachesis.pipeline.offline.replay.stage import ReplayProgress, ReplayRequest
from lachesis.pipeline.runtime.service import open_service
from lachesis.schemas import subjects
from lachesis.schemas.replay import Selection
from lachesis.schemas.subjects import check_name
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.cli.progress import drain_on_signal
from lachesis.services.output import print_json, print_table
from lachesis.services.run.connect import connect_run, open_history, recent_heartbeats
from lachesis.services.shadow import run_shadow, service_name

__all__ = ["shadow_app", "shadow_list", "shadow_start", "shadow_stop"]

_ASK_S = 5.0
_NICE = 10
"""What is live goes first where processor time is short."""

shadow_app = typer.Typer(help="Revisions that score the live run in parallel.", no_args_is_help=True)


@shadow_app.command("start")
@with_options
def shadow_start(
    options: Options,
    revision: Annotated[str, typer.Argument(metavar="NAME", help="Name of the revision.")],
    *,
    env: Annotated[list[str] | None, typer.Option(help="Environment. Repeatable. Default: all.")] = None,
    from_seq: Annotated[
        int | None, typer.Option(min=1, help="First sequence of ROLLOUTS. Default: the next rollout.")
    ] = None,
    max_rate: Annotated[float | None, typer.Option(min=0.001, help="Groups a second at most.")] = None,
    max_inflight: Annotated[int, typer.Option(min=1, help="Groups in flight: read, but not yet written.")] = 32,
    as_json: Json = False,
) -> None:
    """Score the live run a second time while it goes on.

    It uses the raters, normalization and advantages of --config.

    It runs until Ctrl-C or `lachesis shadow stop`, and gives way to the run: what it is too slow for, it does not hold
    up. After a crash the same command goes on where it was, with the same bits as `lachesis replay` would give.
    """
    pace = ReplayPace(max_rate=max_rate, max_inflight=max_inflight)
    config = options.config_with_environments()
    selection = Selection(envs=sorted(set(env or [] or config.environments)), first_seq=from_seq, follow=True)
    os.nice(_NICE)
    result = anyio.run(
        _follow, config, ReplayRequest(revision=check_name("revision", revision), selection=selection, pace=pace)
    )
    if as_json:
        print_json(result)
        return
    print(f"revision {revision}: {result.groups} groups in {result.seconds:.1f} s, digest {result.digest}")
    print("ended: the same command continues from here. Its history may be trimmed meanwhile", file=sys.stderr)


@shadow_app.command("list")
@with_options
def shadow_list(options: Options, as_json: Json = False) -> None:
    """Show each shadow: whether it runs, its position, and its recent difference from the live run."""
    found = anyio.run(_list, options.config())
    if as_json:
        print_json(found)
        return
    if not found:
        print("no revision follows the run: lachesis shadow start NAME --config again.toml")
        return
    header = (
        "revision", "state", "pid", "position", "lag", "groups/s", "compared", "rank correlation", "sign flips",
        "zero variance", "live",
    )  # fmt: skip
    rows = (
        (
            row.revision,
            row.state,
            row.pid,
            row.position,
            row.lag,
            _short(row.groups_per_s),
            row.compared.pairs,
            _short(row.compared.rank_correlation),
            _short(row.compared.sign_flips),
            _short(row.compared.zero_variance),
            _short(row.compared.zero_variance_live),
        )
        for row in found
    )
    print_table(header, rows)


@shadow_app.command("stop")
@with_options
def shadow_stop(
    options: Options, revision: Annotated[str, typer.Argument(metavar="NAME", help="Name of a shadow revision.")]
) -> None:
    """Stop a shadow. Its results stay; starting it again continues from there."""
    anyio.run(_stop, options.config(), check_name("revision", revision))
    print(
        f"shadow {revision} ends; `lachesis shadow start {revision}` with its configuration continues where it stopped"
    )


async def _follow(config: RunConfig, request: ReplayRequest) -> ReplayProgress:
    name = service_name(request.revision)
    async with (
        await connect_run(config, f"{config.run}.{name}", OPERATOR) as bus,
        open_service(bus, name, config.run, request.revision) as service,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(drain_on_signal, service.draining, service.drain)
        print(
            f"revision {request.revision} follows run {config.run}; `lachesis shadow list` shows its position",
            file=sys.stderr,
        )
        result = await run_shadow(service, config, request)
        tasks.cancel_scope.cancel()
    return result


class ShadowStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One shadow. `state` is its heartbeat's, or `not running`; `position` is the next sequence of ROLLOUTS it reads,
    `lag` how many there are from there on, of any run, None where that is not known."""

    revision: str
    envs: list[str]
    state: str
    pid: int | None
    first: int
    position: int
    lag: int | None
    groups_per_s: float | None
    compared: RollingFigures


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


async def _list(config: RunConfig) -> list[ShadowStatus]:
    async with open_history(config, f"{config.run}.shadow") as bus:
        shadows = await following(bus, config.run)
        named = [service_name(defined.revision) for defined, _ in shadows]
        beats = {beat.service: beat for beat in await recent_heartbeats(bus, config.run, named)}
        last = (await bus.usage(subjects.ROLLOUTS)).last
        found = []
        for defined, stored in shadows:
            beat = beats.get(service_name(defined.revision))
            reported = beat.metrics if beat else {}
            position = max(stored, int(reported.get("shadow/position", 0)))
            compared = {
                name: reported[f"shadow/{name}"]
                for name in RollingFigures.__struct_fields__
                if f"shadow/{name}" in reported
            }
            found.append(
                ShadowStatus(
                    revision=defined.revision,
                    envs=defined.selection.envs,
                    state=beat.stage.state if beat else "not running",
                    pid=beat.pid if beat else None,
                    first=defined.first,
                    position=position,
                    lag=max(0, last + 1 - position),
                    groups_per_s=reported.get("shadow/groups_per_s"),
                    compared=msgspec.convert(compared, RollingFigures, strict=False),
                )
            )
        return found


async def _stop(config: RunConfig, revision: str) -> None:
    async with await connect_run(config, f"{config.run}.shadow", OPERATOR) as bus:
        try:
            await bus.request(subjects.shadow(config.run, revision), b"", timeout_s=_ASK_S)
        except InfrastructureError as error:
            raise NotFoundError(
                f"no shadow of revision {revision!r} answers in run {config.run} ({error}); `lachesis shadow list` "
                "shows those that run"
            ) from error
