"""`lachesis trace`: shows one rollout as a waterfall, or follows slow and failed ones.

Reads the streams by their stamps, so that no Jaeger is needed; with `telemetry.jaeger_url`, `--follow` queries Jaeger
instead. Writes nothing.
"""

import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, NamedTuple, Self

import anyio
import httpx
import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.telemetry.spans import Span
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.services.cli.ending import follow_run
from lachesis.services.cli.options import Options, with_options
from lachesis.services.observe.endings import Endings, RolloutEnding
from lachesis.services.observe.find import find_rollout
from lachesis.services.observe.jaeger import Jaeger
from lachesis.services.observe.rollout import Timeline
from lachesis.services.output import SafeConsole, human_seconds, json_text, print_json, printable
from lachesis.services.run.connect import RunHistory, open_history

__all__ = ["render", "run_follow", "run_trace", "trace"]

_PLAIN_WIDTH = 120
_BAR = 44
_MIN_BAR_CHARS = 20
_TIME_COLUMNS_CHARS = 24
"""Characters of the columns `at` and `took`, with what lies between all columns."""
_POLL_S = 5.0
_LOOKBACK = timedelta(minutes=30)
"""How far back each query of Jaeger goes: a trace is stored under its start, long before it ends."""


@with_options
def trace(
    options: Options,
    group: Annotated[
        str | None, typer.Argument(metavar="GROUP_ID", help="Id of a rollout, or any unique part of it.")
    ] = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show slow, failed, stale and redelivered rollouts as they end.")
    ] = False,
    slow: Annotated[
        float | None,
        typer.Option(metavar="S", min=0, help="Seconds from which a rollout counts as slow. Default: the recent p99."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --follow, one object a line.")] = False,
) -> None:
    """Show the spans of a rollout as a waterfall, or follow slow and failed rollouts as they end."""
    if (group is None) is not follow:
        raise typer.BadParameter("name a rollout, or give --follow")
    if group is None:
        run_follow(options, slow_s=slow, as_json=as_json)
    else:
        run_trace(options, group, as_json=as_json)


def run_trace(options: Options, name: str, *, as_json: bool) -> None:
    """Print one rollout's timeline.

    `name`: its id or any part of it. Raises `ConfigError`, `NotFoundError`.
    """
    timeline = anyio.run(_find, options.config(), name)
    if as_json:
        print_json(timeline)
    else:
        console = _console()
        console.print(render(timeline, console.width))


def run_follow(options: Options, *, slow_s: float | None, as_json: bool) -> None:
    """Print rollouts worth a look as they end, until interrupted or until the run ends.

    Of a run that has ended those are printed that there were.
    """
    config = options.config()

    def show(ended: RolloutEnding) -> None:
        if as_json:
            sys.stdout.write(json_text(ended) + "\n")
        else:
            sys.stdout.write(_line(ended) + "\n")
        sys.stdout.flush()

    anyio.run(_follow, config, slow_s, show)


async def _find(config: RunConfig, name: str) -> Timeline:
    async with open_history(config, f"{config.run}.trace") as bus:
        rollout = await find_rollout(bus, config, name)
        return rollout.timeline(config.batching, await bus.server_time_ns())


async def _follow(config: RunConfig, slow_s: float | None, show: Callable[[RolloutEnding], None]) -> None:
    slow_s = config.telemetry.slow_s if slow_s is None else slow_s

    async def follow(history: RunHistory) -> None:
        if not history.ended and sys.stderr.isatty():
            slow = "slower than the recent p99" if slow_s is None else f"of {human_seconds(slow_s)} or more"
            print(f"rollouts {slow}, failed, stale, late and redelivered ones are shown as they end", file=sys.stderr)
        if config.telemetry.jaeger_url is not None and not history.ended:
            await _follow_jaeger(config.telemetry.jaeger_url, config.run, slow_s, show)
        else:
            jaeger_url = config.telemetry.jaeger_url  # of a run that has ended: the links alone
            endings = Endings(config.run, slow_s, teacher=config.batching.teacher != "off", jaeger_url=jaeger_url)
            await _follow_streams(history.bus, config, history.ended, endings, show)

    await follow_run(config, f"{config.run}.trace", follow)


async def _follow_streams(
    bus: Bus, config: RunConfig, ended: bool, endings: Endings, show: Callable[[RolloutEnding], None]
) -> None:
    """Read the ledger from its end on, all of it if the run has `ended`; of ROLLOUTS the headers entries refer to."""
    ledger = subjects.ledger(config.run, config.training.name)
    reports = subjects.state(config.run, "trainer", subjects.LIVE, config.training.name)
    next_member, start = 1, 1
    if not ended:
        last, _, last_seq = await read_last_event(
            bus, subjects.LEDGER, ledger, LedgerEntry, lambda one: one.run == config.run
        )
        next_member, start = (last.watermark + 1 if last else 1), last_seq + 1
    async with bus.read(subjects.LEDGER, [ledger, reports], start=start, follow=not ended) as messages:
        async for message in messages:
            try:
                if message.subject == ledger:
                    entry = decode(LedgerEntry, message.data)
                    next_member = await _members(bus, config.run, endings, next_member)
                    found = endings.entry(entry)
                else:
                    found = endings.report(decode(TrainReport, message.data))
            except SchemaError:
                continue  # what cannot be read ends no rollout that could be shown
            for one in found:
                show(one)


async def _members(bus: Bus, run: str, endings: Endings, start: int) -> int:
    """Read the headers of ROLLOUTS to its end; return the sequence to go on from."""
    async with bus.read(
        subjects.ROLLOUTS, [subjects.rollout(run)], start=start, headers_only=True, follow=False
    ) as members:
        async for message in members:
            start = message.seq + 1
            try:
                plan = Plan.unpack(message.headers.get(PLAN_HEADER))
            except SchemaError:
                continue  # no rollout
            endings.member(message.seq, message.subject.rsplit(".", 1)[-1], plan)
    return start


async def _follow_jaeger(url: str, run: str, slow_s: float | None, show: Callable[[RolloutEnding], None]) -> None:
    """Ask Jaeger every few seconds for the run's rollouts of the last minutes, and show each once."""
    seen: dict[str, float] = {}
    async with httpx.AsyncClient() as client:
        jaeger = Jaeger(url, client, run)
        while True:
            now = datetime.now(UTC)
            try:
                found = await jaeger.find(now - _LOOKBACK, now, slow_s)
                ended = [await jaeger.rollout(group, why) for group, why in found.items() if group not in seen]
            except InfrastructureError as error:
                print(f"lachesis: {error}; asking again", file=sys.stderr)
            else:
                for one in sorted(filter(None, ended), key=lambda one: one.ended_ns):
                    show(one)
                seen |= dict.fromkeys(found, time.monotonic())
            forgotten = time.monotonic() - 2 * _LOOKBACK.total_seconds()
            seen = {group: at for group, at in seen.items() if at > forgotten}
            await anyio.sleep(_POLL_S)


def _line(ended: RolloutEnding) -> str:
    when = datetime.fromtimestamp(ended.ended_ns / 1e9, UTC).strftime("%H:%M:%S")
    parts = [when, ended.group, f"{ended.why:11}", f"{human_seconds(ended.seconds):>7}", ended.env, ended.outcome]
    if ended.longest is not None:
        parts.append(f"longest: {ended.longest} {human_seconds(ended.longest_s)}")
    return "  ".join(printable(part) for part in (*parts, *filter(None, (ended.reason, ended.url))))


def _console() -> Console:
    return SafeConsole(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def render(timeline: Timeline, width: int = _PLAIN_WIDTH) -> RenderableType:
    """Return the waterfall: what was done to the rollout, when, and for how long it waited before.

    `width` wide.
    """
    legend = Text("░ waits for the service to take it up   █ the service works on it", style="dim")
    return Group(*_head(timeline), Text(), _waterfall(timeline, width), Text(), legend)


def _head(timeline: Timeline) -> Iterator[Text]:
    where = printable(f"   {timeline.env}, run {timeline.run}")
    yield Text.assemble((f"rollout {printable(timeline.group)}", "bold"), where)
    several = f"{timeline.samples} samples in " if timeline.samples != timeline.sequences else ""
    yield Text(
        f"{several}{timeline.sequences} sequences, {timeline.tokens} tokens, policy step {timeline.policy_step}, "
        f"{printable(timeline.producer)}, ROLLOUTS:{timeline.seq}"
    )
    step = "" if timeline.step is None else f", optimizer step {timeline.step}"
    took = "" if timeline.seconds is None else f", {human_seconds(timeline.seconds)}"
    so_far = " so far" if took and timeline.ended_ns is None else ""
    yield Text(f"{printable(timeline.state)}{step}{took}{so_far}", style="bold")
    if timeline.waits_for is not None:
        yield Text(printable(f"waits for {timeline.waits_for}"), style="yellow")
    longest = max((span for span in timeline.spans if span.parent is not None), key=_took_s, default=None)
    if longest is not None and timeline.ended_ns is not None and timeline.seconds is not None:
        share = 100 * _took_s(longest) / max(timeline.seconds, 1e-9)
        what = printable(f"{longest.service} {_short(longest)}")
        yield Text(f"longest: {what}, {human_seconds(_took_s(longest))} ({share:.0f} %)")
    if timeline.reason is not None:
        yield Text(printable(timeline.reason), style="red")
    if timeline.state == "trained" and timeline.ended_ns is None:
        yield Text(
            "when its step was taken is not known: the report of it was trimmed, or its trainer died", style="dim"
        )


def _waterfall(timeline: Timeline, width: int) -> Table:
    spans = sorted(timeline.spans, key=lambda span: (span.parent is not None, span.start_ns))
    end_ns = max([timeline.ended_ns or timeline.now_ns, *(span.end_ns for span in spans)])
    rows = [_WaterfallRow.of(span) for span in spans]
    if timeline.waits_for is not None:
        since_ns = max([timeline.stored_ns, *(span.end_ns for span in spans)])
        rows.append(_WaterfallRow("", "waiting", "waiting", since_ns, end_ns, waits=True))
    room = width - max(len(row.service) for row in rows) - _TIME_COLUMNS_CHARS
    short = room - max(len(row.name) for row in rows) < _MIN_BAR_CHARS  # figures and bars go before the subjects
    bar = max(1, min(_BAR, room - max(len(row.short if short else row.name) for row in rows)))
    whole_ns = max(1, end_ns - timeline.started_ns)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("service", "left"), ("span", "left"), ("at", "right"), ("took", "right"), ("", "left")):
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row.service,
            Text(row.short if short else row.name, style="dim" if row.waits else ""),
            human_seconds((row.start_ns - timeline.started_ns) / 1e9),
            human_seconds((row.end_ns - row.start_ns) / 1e9),
            Text(_bar(row, timeline.started_ns, whole_ns, bar), style=row.style),
        )
    return table


class _WaterfallRow(NamedTuple):
    """A line of the waterfall; `short` is the name without the subject."""

    service: str
    name: str
    short: str
    start_ns: int
    end_ns: int
    waits: bool = False
    failed: bool = False

    @classmethod
    def of(cls, span: Span) -> Self:
        attempt = span.attributes.get("rl.delivery.attempt", 1)
        again = f" (delivery {attempt})" if attempt != 1 else ""
        waits = span.name.startswith("queue.wait")
        subject = span.attributes.get("messaging.destination.name")
        whole = span.name if subject is None else f"{_short(span)} {subject}"
        names = printable(whole + again), printable(_short(span) + again)
        return cls(
            printable(span.service), *names, span.start_ns, span.end_ns, waits=waits, failed=span.error is not None
        )

    @property
    def style(self) -> str:
        return "red" if self.failed else "yellow" if self.waits else "cyan"


def _short(span: Span) -> str:
    return span.name.partition(" ")[0]


def _took_s(span: Span) -> float:
    return (span.end_ns - span.start_ns) / 1e9


def _bar(row: _WaterfallRow, start_ns: int, whole_ns: int, width: int) -> str:
    begin = min(width - 1, max(0, (row.start_ns - start_ns) * width // whole_ns))
    end = min(width, -(-(row.end_ns - start_ns) * width // whole_ns))
    return " " * begin + ("░" if row.waits else "█") * max(1, end - begin)
