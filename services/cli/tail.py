"""`lachesis tail`: prints events as they are stored, decoded and filtered.

It ends with Ctrl-C, or when the reader closes the pipe.
"""

import os
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import anyio
import typer

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.catalog import CHANNELS, Channel, channel_of, narrow
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.ending import follow_run
from lachesis.services.cli.events import FieldFilter, json_line, text_line, to_plain
from lachesis.services.cli.options import Options, with_options
from lachesis.services.observe.find import first_seq_of_last
from lachesis.services.run.connect import RunHistory, open_run

__all__ = ["Printer", "StreamSlice", "TailTargets", "resolve", "tail"]


@with_options
def tail(
    options: Options,
    subject: Annotated[
        str, typer.Argument(help="A subject (`rl.score.>`) or a kind (score, reward, ledger, dead...).")
    ],
    *,
    since_start: Annotated[bool, typer.Option("--since-start", help="Start at the oldest message.")] = False,
    last: Annotated[int | None, typer.Option(min=1, metavar="N", help="Start N messages back.")] = None,
    follow: Annotated[bool, typer.Option(help="Wait for further messages.")] = True,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="Only events with this value, e.g. groups.item=7. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Also show column values, stamps and digests.")] = False,
) -> None:
    """Follow events as they are stored, decoded."""
    span = StreamSlice(since_start=since_start, last=last, follow=follow)
    config = options.config()
    wanted = resolve(subject, config.run)
    printer = Printer([FieldFilter.parse(text, wanted.channels) for text in where or []], as_json, full)
    try:
        anyio.run(_tail, config, wanted, span, printer)
    except* BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush at exit goes nowhere


@dataclass(frozen=True, slots=True)
class StreamSlice:
    """What of each stream: from the oldest message on, from `last` messages back, or (neither) from the next one;

    with `follow` until the run ends, else up to where the stream ends now. Of a run that has ended: all, or the last.
    """

    since_start: bool = False
    last: int | None = None
    follow: bool = True

    def __post_init__(self) -> None:
        if self.since_start and self.last is not None:
            raise ConfigError("--since-start and --last: give one of them")


@dataclass(frozen=True, slots=True)
class TailTargets:
    """What to follow: the channels concerned, filters by stream, and subjects of core NATS."""

    channels: list[Channel]
    filters: dict[str, list[str]]
    subjects: list[str]


@dataclass(frozen=True, slots=True)
class Printer:
    """Writes the events that pass the filters to standard output, each at once."""

    filters: Sequence[FieldFilter]
    as_json: bool
    full: bool

    def show(self, message: StoredMessage) -> None:
        channel = channel_of(message.subject)
        if channel is None:
            return
        event = to_plain(message, channel, full=self.full)
        if not all(where.matches(message, event) for where in self.filters):
            return
        if self.as_json:
            sys.stdout.write(json_line(message, event) + "\n")
        else:
            line = text_line(message, event, full=self.full)
            if sys.stdout.isatty() and not self.full:
                line = line[: shutil.get_terminal_size().columns]
            sys.stdout.write(line + "\n")
        sys.stdout.flush()


def resolve(subject: str, run: str) -> TailTargets:
    """Return what `subject` means: a subject with wildcards, or a kind of this run. Raises `ConfigError`."""
    named = [channel for channel in CHANNELS if channel.name == subject]
    if named:
        subject = ".".join(run if part == "{run}" else pattern for part, pattern in _parts(named[0]))
    parts = subject.split(".")
    pairs = [(channel, found) for channel in CHANNELS if (found := narrow(subject, channel.pattern)) is not None]
    if "*" in parts[1:2]:  # requests only by name: a server that knows identities lets no client listen to them
        pairs = [(channel, found) for channel, found in pairs if channel.reply is None]
    if not pairs or not all(parts) or ">" in parts[:-1]:
        kinds = ", ".join(channel.name for channel in CHANNELS)
        raise ConfigError(
            f"nothing travels on {subject!r}; use a subject such as 'rl.score.>' (in quotes), or one of {kinds}"
        )
    filters: dict[str, list[str]] = {}
    for channel, found in pairs:
        if channel.stream is not None:
            filters.setdefault(channel.stream, []).append(found)
    return TailTargets(
        [channel for channel, _ in pairs], filters, [found for channel, found in pairs if channel.stream is None]
    )


def _parts(channel: Channel) -> list[tuple[str, str]]:
    return list(zip(channel.address.split("."), channel.pattern.split("."), strict=True))


async def _tail(config: RunConfig, wanted: TailTargets, span: StreamSlice, printer: Printer) -> None:
    name, show = f"{config.run}.tail", partial(_show, wanted, span, printer)
    if span.follow:
        await follow_run(config, name, show)
    else:
        async with open_run(config, name) as history:
            await show(history)


async def _show(wanted: TailTargets, span: StreamSlice, printer: Printer, history: RunHistory) -> None:
    bus, ended = history
    if ended and span.follow:
        span = StreamSlice(since_start=span.last is None, last=span.last, follow=False)
    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as readers:
            if _is_pipe(sys.stdout.fileno()):
                tasks.start_soon(_stop_when_pipe_closes, readers.cancel_scope)
            for stream, filters in wanted.filters.items():
                readers.start_soon(_follow_stream, bus, stream, filters, span, printer)
            for subject in wanted.subjects if span.follow else ():
                readers.start_soon(_follow_core, bus, subject, printer)
        tasks.cancel_scope.cancel()


async def _follow_stream(bus: Bus, stream: str, filters: list[str], span: StreamSlice, printer: Printer) -> None:
    usage = await bus.usage(stream)
    start = usage.last + 1
    if span.since_start:
        start = usage.first
    elif span.last is not None:
        start = await first_seq_of_last(bus, stream, filters, span.last)
    async with bus.read(stream, filters, start=start, follow=span.follow) as messages:
        async for message in messages:
            printer.show(message)


async def _follow_core(bus: Bus, subject: str, printer: Printer) -> None:
    async with bus.listen(subject) as messages:
        async for message in messages:
            printer.show(message)


def _is_pipe(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


async def _stop_when_pipe_closes(scope: anyio.CancelScope) -> None:
    """Cancel once the reader of standard output is gone, even if no further event would show that."""
    await anyio.wait_readable(sys.stdout.fileno())  # the writing end of a pipe becomes "readable" by an error alone
    scope.cancel()
