"""`lachesis dead`: what could not be handled, why, and the message itself, which stays where it was stored."""

from datetime import UTC, datetime
from typing import Any

import anyio

from lachesis.pipeline.bus.api import Stored
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas import subjects
from lachesis.schemas.access import OBSERVER
from lachesis.schemas.annotations import DeadLetter
from lachesis.schemas.catalog import channel_of
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import NotFoundError, SchemaError
from lachesis.services.cli.events import plain, to_plain
from lachesis.services.cli.options import Options
from lachesis.services.cli.output import print_json, print_table
from lachesis.services.connect import connect_run

__all__ = ["list_dead", "show_dead"]


def list_dead(options: Options, *, as_json: bool) -> None:
    """Print the run's dead letters of every revision, oldest first."""
    letters = anyio.run(_list, options.config())
    if as_json:
        print_json([{"letter": seq, **plain(letter, full=False)} for seq, letter in letters])
        return
    rows = (
        (seq, _when(letter), letter.env, letter.stage, letter.kind, f"{letter.stream} {letter.seq}", letter.reason)
        for seq, letter in letters
    )
    print_table(("letter", "time (UTC)", "env", "stage", "kind", "message", "reason"), rows)


def show_dead(options: Options, seq: int) -> None:
    """Print one letter, and the message it is about as far as it can be read."""
    print_json(anyio.run(_show, options.config(), seq))


async def _list(config: RunConfig) -> list[tuple[int, DeadLetter]]:
    found = []
    async with await connect_run(config, f"{config.run}.dead", OBSERVER) as bus:
        subject = subjects.event("dead", config.run, "*")
        async with bus.read(subjects.EVENTS, [subject], follow=False) as messages:
            async for message in messages:
                try:
                    found.append((message.seq, decode(DeadLetter, message.data)))
                except SchemaError:
                    continue  # `tail dead` shows what it is
    return found


async def _show(config: RunConfig, seq: int) -> dict[str, Any]:
    async with await connect_run(config, f"{config.run}.dead", OBSERVER) as bus:
        stored = await bus.get(subjects.EVENTS, seq)
        channel = channel_of(stored.subject)
        if channel is None or channel.name != "dead":
            raise NotFoundError(f"message {seq} of EVENTS is no dead letter; `lachesis dead list` shows which are")
        letter = decode(DeadLetter, stored.data)
        try:
            message = _described(await bus.get(letter.stream, letter.seq))
        except NotFoundError:
            message = {"error": "no longer stored"}
    return {"letter": plain(letter, full=False), "message": message}


def _described(message: Stored) -> dict[str, Any]:
    channel = channel_of(message.subject)
    content = to_plain(message, channel) if channel else {"bytes": len(message.data)}
    return {"subject": message.subject, "headers": dict(message.headers), "content": content}


def _when(letter: DeadLetter) -> str:
    return datetime.fromtimestamp(letter.time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
