"""Commands that look at a run as it goes on, and let it go on: `status`, `top`, `trace`, `tail`, `health`, `resume`."""

from typing import Annotated

import typer

from lachesis.services.cli.options import Json, Options, with_options

__all__ = ["health", "resume", "status", "tail", "top", "trace"]


@with_options
def status(options: Options, as_json: Json = False) -> None:
    """Show how the run stands: streams, services, ledger, policy, trainer."""
    from lachesis.services.cli.status import run_status

    run_status(options, as_json=as_json)


@with_options
def top(
    options: Options,
    *,
    once: Annotated[bool, typer.Option("--once", help="Look once, print what was seen, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Look once and print JSON.")] = False,
    window: Annotated[float, typer.Option(min=2, help="Seconds that rates and percentiles are over.")] = 15.0,
) -> None:
    """Watch the run: each stage's lag, rate and times, and which of them is the bottleneck. Ends with Ctrl-C."""
    from lachesis.services.cli.top import run_top

    run_top(options, once=once, as_json=as_json, window_s=window)


@with_options
def trace(
    options: Options,
    group: Annotated[
        str | None, typer.Argument(metavar="GROUP_ID", help="A rollout: its id, or any part that no other has.")
    ] = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show slow, failed, stale and redelivered rollouts as they end.")
    ] = False,
    slow: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="Seconds from which one is slow; default: the recent p99.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --follow one object a line.")] = False,
) -> None:
    """Show where a rollout's time went, as a waterfall, or follow those that are worth a look as they end."""
    from lachesis.services.cli.trace import run_follow, run_trace

    if (group is None) is not follow:
        raise typer.BadParameter("name a rollout, or give --follow")
    if group is None:
        run_follow(options, slow_s=slow, as_json=as_json)
    else:
        run_trace(options, group, as_json=as_json)


@with_options
def tail(
    options: Options,
    subject: Annotated[
        str, typer.Argument(help="A subject (`rl.score.>`) or a kind (score, reward, ledger, dead...).")
    ],
    *,
    since_start: Annotated[bool, typer.Option("--since-start", help="Begin with the oldest message.")] = False,
    last: Annotated[int | None, typer.Option(min=1, metavar="N", help="Begin N messages back.")] = None,
    follow: Annotated[bool, typer.Option(help="Wait for further messages.")] = True,
    where: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help="Only such events, e.g. groups.item=7.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Columns with their values, stamps, digests.")] = False,
) -> None:
    """Follow events as they are stored, decoded."""
    from lachesis.services.cli.tail import Span, run_tail

    span = Span(since_start=since_start, last=last, follow=follow)
    run_tail(options, subject, span, where=where or [], as_json=as_json, full=full)


@with_options
def health(
    options: Options,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print alerts as they come, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show what the health checks found. Exits with 1 if an environment is quarantined, halted, or not judged yet."""
    from lachesis.services.cli.health import run_health

    run_health(options, follow=follow, as_json=as_json)


@with_options
def resume(
    options: Options,
    env: Annotated[str | None, typer.Argument(help="Environment; none: all that are quarantined or halted.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the health service.")] = 15.0,
) -> None:
    """Let an environment go on that a health check has quarantined or halted. The checks begin anew."""
    from lachesis.services.cli.health import run_resume

    run_resume(options, env, wait_s=wait)
