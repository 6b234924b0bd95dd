"""`lachesis dead`: lists messages that could not be handled, with the reason, and requeues them.

The message itself stays where it was stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import anyio
import typer

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, NotFoundError
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter
from lachesis.schemas.catalog import channel_of
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import ConfigError, DataError, SchemaError
from lachesis.services.cli.events import plain_values, to_plain
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.output import print_json, print_table
from lachesis.services.requeue import RequeueCase, Requeuer, examine
from lachesis.services.run.connect import CONNECT_S, connect_run, open_history

__all__ = ["LetterSelection", "dead_app", "dead_list", "dead_requeue", "dead_show"]

dead_app = typer.Typer(help="Messages that could not be handled.", no_args_is_help=True)


@dead_app.command("list")
@with_options
def dead_list(options: Options, as_json: Json = False) -> None:
    """List the run's dead letters."""
    letters = anyio.run(_list, options.config())
    if as_json:
        print_json([{"letter": seq, **plain_values(letter, full=False)} for seq, letter in letters])
        return
    rows = (
        (seq, _when(letter), letter.env, letter.stage, letter.kind, f"{letter.stream} {letter.seq}", letter.reason)
        for seq, letter in letters
    )
    print_table(("letter", "time (UTC)", "env", "stage", "kind", "message", "reason"), rows)


@dead_app.command("show")
@with_options
def dead_show(
    options: Options, seq: Annotated[int, typer.Argument(min=1, help="Sequence, as `dead list` prints it.")]
) -> None:
    """Show one dead letter and its message as JSON."""
    print_json(anyio.run(_show, options.config(), seq))


@dead_app.command("requeue")
@with_options
def dead_requeue(
    options: Options,
    letters: Annotated[
        list[int] | None, typer.Argument(metavar="LETTER", help="Sequences, as `dead list` prints them.")
    ] = None,
    *,
    env: Annotated[str | None, typer.Option(help="Only letters of this environment.")] = None,
    stage: Annotated[str | None, typer.Option(help="Only letters of this stage.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only letters of this kind: data, poison or deadline.")] = None,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only letters whose reason contains this text.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All letters.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for each rollout's admission.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Requeue dead letters after a fix: rollouts as new ones, annotations unchanged. Safe to repeat."""
    chosen = LetterSelection(frozenset(letters or ()), env, stage, kind, reason, everything)
    if as_json and not (dry_run or yes):
        raise ConfigError("--json asks nothing: give --yes or --dry-run with it")
    config = options.config()
    anyio.run(_requeue, config, chosen, _RequeueMode(dry_run, yes, wait, as_json))


@dataclass(frozen=True, slots=True)
class LetterSelection:
    """Which letters: those with these numbers, or all that every filter given here fits. None: any."""

    letters: frozenset[int]
    env: str | None
    stage: str | None
    kind: str | None
    reason: str | None
    everything: bool

    def __post_init__(self) -> None:
        if not (self.letters or self.everything or self.env or self.stage or self.kind or self.reason):
            raise ConfigError(
                "say which: numbers of letters (`lachesis dead list`), --env, --stage, --reason... or --all"
            )

    def fits(self, seq: int, letter: DeadLetter) -> bool:
        """Whether the letter is one of them; `reason` may stand anywhere in the letter's."""
        wanted = ((self.env, letter.env), (self.stage, letter.stage), (self.kind, letter.kind))
        return (
            (not self.letters or seq in self.letters)
            and all(ours in {None, theirs} for ours, theirs in wanted)
            and (self.reason is None or self.reason in letter.reason)
        )


@dataclass(frozen=True, slots=True)
class _RequeueMode:
    dry_run: bool
    yes: bool
    wait_s: float
    as_json: bool


async def _requeue(config: RunConfig, selection: LetterSelection, manner: _RequeueMode) -> None:
    async with await connect_run(config, f"{config.run}.requeue", OPERATOR) as bus:
        letters = [(seq, letter) for seq, letter in await _letters(bus, config.run) if selection.fits(seq, letter)]
        unknown = selection.letters - {seq for seq, _ in letters}
        if unknown:
            raise NotFoundError(
                f"no such dead letter: {', '.join(map(str, sorted(unknown)))}; see `lachesis dead list`"
            )
        cases = await examine(bus, config, letters)
        ready = [case for case in cases if case.qualifies]
        stored: dict[int, int] = {}
        if not manner.as_json:
            _print_cases(cases, stored, dry_run=True)
        if ready and not manner.dry_run and (manner.yes or typer.confirm(f"put {len(ready)} of them back?", err=True)):
            stored = await _put_back(bus, config, ready, manner.wait_s)
            if not manner.as_json:
                _print_cases(ready, stored, dry_run=False)
        if manner.as_json:
            print_json([_row(case, stored) for case in cases])
    if selection.letters and any(case.refusal is not None for case in cases):
        raise typer.Exit(1)


async def _put_back(bus: Bus, config: RunConfig, cases: Sequence[RequeueCase], wait_s: float) -> dict[int, int]:
    """Store the cases one after the other; what the governor does not admit within `wait_s` seconds is left."""
    service = Service(bus, "requeue", config.run, config.revision)
    requeuer = Requeuer(service)
    stored: dict[int, int] = {}
    for case in cases:
        with anyio.move_on_after(wait_s) as waiting:
            stored[case.seq] = await requeuer.requeue_case(case)
        if waiting.cancelled_caught:
            raise InfrastructureError(
                f"{len(stored)} of {len(cases)} put back, then none admitted for {wait_s:g} s "
                f"({service.vitals.status_text or 'no answer'}); repeat the command for the others once the run goes on"
            )
    return stored


def _row(case: RequeueCase, stored: Mapping[int, int]) -> dict[str, Any]:
    letter = case.letter
    return {
        "letter": case.seq,
        "env": letter.env,
        "stage": letter.stage,
        "message": {"stream": letter.stream, "seq": letter.seq},
        "stored": stored.get(case.seq, case.done),
        "refused": case.refusal,
        "stale": case.stale,
    }


def _print_cases(cases: Sequence[RequeueCase], stored: Mapping[int, int], *, dry_run: bool) -> None:
    def what(case: RequeueCase) -> str:
        if case.refusal is not None:
            return f"left alone: {case.refusal}"
        if case.done is not None:
            return f"put back before, as {case.letter.stream} {case.done}"
        late = ", but too old by now: it will be recorded as stale" if case.stale else ""
        return f"can be put back{late}" if dry_run else f"put back as {case.letter.stream} {stored[case.seq]}"

    rows = (
        (case.seq, case.letter.env, case.letter.stage, f"{case.letter.stream} {case.letter.seq}", what(case))
        for case in cases
    )
    print_table(("letter", "env", "stage", "message", ""), rows)


async def _list(config: RunConfig) -> list[tuple[int, DeadLetter]]:
    async with open_history(config, f"{config.run}.dead", patience_s=CONNECT_S) as bus:
        return await _letters(bus, config.run)


async def _letters(bus: Bus, run: str) -> list[tuple[int, DeadLetter]]:
    found = []
    async with bus.read(subjects.EVENTS, [subjects.event("dead", run, "*")], follow=False) as messages:
        async for message in messages:
            try:
                found.append((message.seq, decode(DeadLetter, message.data)))
            except SchemaError:
                continue  # `tail dead` shows what it is
    return found


async def _show(config: RunConfig, seq: int) -> dict[str, Any]:
    async with open_history(config, f"{config.run}.dead", patience_s=CONNECT_S) as bus:
        stored = await bus.get(subjects.EVENTS, seq)
        channel = channel_of(stored.subject)
        if channel is None or channel.name != "dead":
            raise NotFoundError(f"message {seq} of EVENTS is no dead letter; `lachesis dead list` shows which are")
        letter = decode(DeadLetter, stored.data)
        try:
            known = letter.stream in subjects.STREAMS
            message = _described(await bus.get(letter.stream, letter.seq)) if known else {"error": "no such stream"}
        except NotFoundError:
            message = {"error": "no longer stored"}
        except DataError as error:  # a large message that cannot be put together
            message = {"error": str(error)}
    return {"letter": plain_values(letter, full=False), "message": message}


def _described(message: StoredMessage) -> dict[str, Any]:
    channel = channel_of(message.subject)
    content = to_plain(message, channel) if channel else {"bytes": len(message.data)}
    return {"subject": message.subject, "headers": dict(message.headers), "content": content}


def _when(letter: DeadLetter) -> str:
    try:
        return datetime.fromtimestamp(letter.time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError):
        return "?"  # a year beyond all calendars: the writer of the letter has no clock
