"""`lachesis health` and `lachesis resume`.

What the health checks found, where that leaves each environment, and the way on.
"""

import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import anyio
import typer
from rich.text import Text

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.notices.text import notice_lines
from lachesis.schemas import keys, subjects
from lachesis.schemas.alerts import AlertEvent, EnvironmentStanding, ResumeRequest
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.notices import Notice
from lachesis.services.cli.ending import follow_run
from lachesis.services.cli.last_notices import showing_last_notices
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.observe.health import EnvHealth, checked_environments, read_alert, read_health
from lachesis.services.observe.live_run_state import notices_of_run
from lachesis.services.observe.notices import DISK
from lachesis.services.output import json_text, print_json, print_table, printable
from lachesis.services.run.connect import CONNECT_S, RunHistory, connect_run, open_run

__all__ = ["follow_health", "health", "request_resume", "resume"]

_STYLES = {"inform": "cyan", "warn": "yellow", "quarantine": "red", "halt": "red", "idle": "dim"}


@with_options
def health(
    options: Options,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print alerts as they come, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show the health checks. Exits with 1 if an environment is quarantined, halted, or not checked yet.

    It also shows what stands in the way of the run, and exits with 1 if that is a full disk.
    """
    config = options.config()
    if follow:
        anyio.run(follow_health, config, as_json)
        return
    with showing_last_notices(config, on_stderr=as_json):
        found, notices = anyio.run(_read, config)
    if as_json:
        print_json(found)
    else:
        _print(found, config.health.window)
    for line in notice_lines(notices, time.time_ns()):
        print(printable(f"notice: {line}"), file=sys.stderr if as_json else sys.stdout)
    full = any(one.stops and one.key.startswith(DISK) for one in notices)
    if full or not all(health.is_healthy for health in found):
        raise typer.Exit(1)


@with_options
def resume(
    options: Options,
    env: Annotated[str | None, typer.Argument(help="Environment. Default: all that are quarantined or halted.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the health service.")] = 15.0,
) -> None:
    """Resume a quarantined or halted environment. Its health checks start over."""
    config = options.config()
    if not anyio.run(_resume, config, env, wait):
        raise typer.Exit(1)


async def _read(config: RunConfig) -> tuple[list[EnvHealth], list[Notice]]:
    async with open_run(config, f"{config.run}.health-cli", patience_s=CONNECT_S) as (bus, ended):
        found = [await read_health(bus, config, env) for env in await checked_environments(bus, config)]
        return found, [] if ended else await notices_of_run(bus, config)


def _print(found: Sequence[EnvHealth], window: int) -> None:
    for health in found:
        print(printable(f"{health.env}: {_says(health, window)}"))
        if health.no_curriculum is not None:
            print(printable(f"no curriculum for {health.env}: {health.no_curriculum}"))
    print()
    rows = (
        (
            health.env,
            result.check,
            Text(result.severity, style=_STYLES.get(result.severity, "green")),
            _number(result.value),
            _number(result.threshold),
            result.windows or None,
            result.reason,
            None if result.severity == "ok" else " ".join(result.examples[:2]),
        )
        for health in found
        for result in health.results
    )
    print_table(("env", "check", "says", "value", "threshold", "windows", "reason", "groups"), rows)


def _says(health: EnvHealth, window: int) -> str:
    standing = health.standing
    if standing.halted:
        return f"HALTED by {standing.cause}: nothing is dispatched; fix the cause, then `lachesis resume {health.env}`"
    if standing.quarantined_from is not None:
        return (
            f"QUARANTINED by {standing.cause}: rollouts from {standing.quarantined_from} on are not trained; fix "
            f"the cause, then `lachesis resume {health.env}`"
        )
    if not health.groups:
        return f"not checked yet: a check takes {window} groups (health.window); `lachesis top` shows what runs"
    worst = [result.check for result in health.results if result.severity == "warn"]
    return f"{health.groups} groups checked; {'warnings: ' + ', '.join(worst) if worst else 'nothing to warn of'}"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


async def follow_health(config: RunConfig, as_json: bool) -> None:
    """Print each alert, and each change of a standing, as it comes.

    Until interrupted or until the run ends.

    Of a run that has ended all are printed.
    """
    await follow_run(config, f"{config.run}.health-cli", partial(_show, config, as_json))


async def _show(config: RunConfig, as_json: bool, history: RunHistory) -> None:
    bus, ended = history
    before: dict[str, EnvironmentStanding] = {}
    subject = subjects.event("alert", config.run, config.revision)
    usage = await bus.usage(subjects.EVENTS)
    start = usage.first if ended else usage.last + 1
    async with bus.read(subjects.EVENTS, [subject], start=start, follow=not ended) as messages:
        async for message in messages:
            event = read_alert(message)
            if event is None:
                continue
            changed = event.standing != before.get(event.env, EnvironmentStanding()) or event.source == "resume"
            before[event.env] = event.standing
            for line in _lines(event, config.health.window, changed=changed, as_json=as_json):
                print(line, flush=True)


def _lines(event: AlertEvent, window: int, *, changed: bool, as_json: bool) -> list[str]:
    if as_json:
        reported = {"env": event.env, "groups": event.groups, "standing": event.standing}
        return [json_text({**reported, "alert": alert}) for alert in event.alerts] or (
            [json_text({**reported, "alert": None})] if changed else []
        )
    lines = [
        f"{alert.severity} {event.env} {alert.check}: {printable(alert.reason)} ({' '.join(alert.examples)})"
        for alert in event.alerts
    ]
    if changed:
        health = EnvHealth(env=event.env, standing=event.standing, groups=event.groups, results=event.results)
        lines.append(f"{event.env}: {_says(health, window)}")
    return lines


async def _resume(config: RunConfig, env: str | None, wait_s: float) -> bool:
    done = True
    async with await connect_run(config, f"{config.run}.resume", OPERATOR) as bus:
        known = await checked_environments(bus, config)
        if env is not None and env not in known:
            raise ConfigError(f"there is no environment {env!r}; there are {', '.join(known)}")
        found = [await read_health(bus, config, name) for name in known]
        stopped = [health.env for health in found if health.stopped]
        wanted = stopped if env is None else [env]
        if not wanted:
            print("nothing is quarantined or halted")
        for name in wanted:
            if await request_resume(bus, config, name, wait_s=wait_s):
                print(f"{name}: resumed; its checks start over")
            else:
                done = False
                print(f"{name}: requested; the health service did not answer in {wait_s:g} s, and does it once it runs")
    return done


async def request_resume(bus: Bus, config: RunConfig, env: str, *, wait_s: float) -> bool:
    """Store the request, and return whether the health service answered it in time."""
    subject = subjects.event("alert", config.run, config.revision, env)
    start = (await bus.usage(subjects.EVENTS)).last + 1
    after = (await bus.usage(subjects.ROLLOUTS)).last
    request = ResumeRequest(run=config.run, env=env, after=after, asked_ns=time.time_ns())
    await bus.put(keys.resume(env), encode(request))
    with anyio.move_on_after(wait_s):
        async with bus.read(subjects.EVENTS, [subject], start=start) as messages:
            async for message in messages:
                event = read_alert(message)
                if event is not None and event.source == "resume":
                    return True
    return False
