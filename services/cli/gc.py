"""`lachesis gc`: lists the unused history of a run; `--yes` deletes it."""

import re
import sys
from typing import Annotated, Any

import anyio
import typer

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.sizes import parse_bytes
from lachesis.pipeline.retention.collector import GarbageCollector, GcLimits, GcPlan
from lachesis.pipeline.retention.garbage import GcDecision
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import LEDGER, REPLAY
from lachesis.services.cli.consumers import collect_attempts, collect_consumers
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.cli.train import OFFLINE_FOLDER
from lachesis.services.output import human_bytes, print_json, print_table
from lachesis.services.run.connect import open_run
from lachesis.services.stage_settings import history_settings

__all__ = ["collect_garbage", "gc", "limits"]

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|w)")
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MAX_NAMED_HOLDERS = 3


@with_options
def gc(
    options: Options,
    *,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Delete history older than this: 12h, 7d.")
    ] = None,
    keep_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Delete the oldest history until each stream is at most this large: 2GiB."),
    ] = None,
    revision: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Delete this re-scored revision. Repeatable.")
    ] = None,
    trainer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Delete this offline trainer's ledger, finished or not; its checkpoints stay."
        ),
    ] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Also delete the beginning of the ledger. Its record is lost.")
    ] = False,
    consumers: Annotated[
        bool,
        typer.Option("--consumers", help="Delete the server's consumers of this run; those in use are created again."),
    ] = False,
    attempts: Annotated[
        bool, typer.Option("--attempts", help="Delete this run's records of failed deliveries; stages make new ones.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete; without it, the list is only shown.")] = False,
    as_json: Json = False,
) -> None:
    """List unused history (by age, size, revision or offline trainer); `--yes` deletes it.

    Unused means that no reader, no hold and no resumable checkpoint needs it. The governor trims a run by itself; this
    command also deletes evaluations, revisions and the ledger, which the governor never trims. It is safe beside a
    running governor, and safe to repeat. `lachesis runs delete` deletes a whole run.
    """

    history = older_than or keep_bytes or revision or trainer or ledger
    if consumers + attempts + bool(history) > 1:
        raise typer.BadParameter("--consumers and --attempts go with no other option but --yes and --json")
    if consumers:
        collect_consumers(options, yes=yes, as_json=as_json)
    elif attempts:
        collect_attempts(options, yes=yes, as_json=as_json)
    else:
        wanted = limits(older_than, keep_bytes, revision or [], trainer or [], ledger=ledger)
        collect_garbage(options, wanted, yes=yes, as_json=as_json)


def limits(
    older_than: str | None, keep_bytes: str | None, revisions: list[str], trainers: list[str], *, ledger: bool
) -> GcLimits:
    """Return what the command line asks for. Raises `ConfigError`."""
    age = None if older_than is None else _AGE.fullmatch(older_than.strip())
    if older_than is not None and age is None:
        raise ConfigError(f"--older-than {older_than!r}: a number and one of s, m, h, d, w: 12h, 7d")
    try:
        keep = None if keep_bytes is None else parse_bytes(keep_bytes)
    except ConfigError as error:
        raise ConfigError(f"--keep-bytes: {error}") from error
    return GcLimits(
        older_than_s=None if age is None else float(age[1]) * _AGES[age[2]],
        keep_bytes=keep,
        revisions=tuple(revisions),
        trainers=tuple(trainers),
        ledger=ledger,
    )


def collect_garbage(options: Options, wanted: GcLimits, *, yes: bool, as_json: bool) -> None:
    """Show what goes, and delete it if `yes`."""
    named = wanted.revisions or wanted.trainers
    nothing = wanted.older_than_s is None and wanted.keep_bytes is None and not named
    if nothing and yes:
        raise ConfigError(
            "say what to keep: --older-than AGE, --keep-bytes SIZE; or what goes: --revision NAME, --trainer NAME"
        )
    config = options.config()
    found = anyio.run(_collect, config, wanted, yes, nothing)
    if as_json:
        print_json(_plain(config, found, deleted=yes))
        return
    _print(found)
    if nothing:
        print(
            "\nshown: all that is not needed. Say what to keep with --older-than AGE, --keep-bytes SIZE, or name a "
            "--revision or --trainer, and give --yes to delete",
            file=sys.stderr,
        )
    elif not yes:
        print("\nnothing was deleted: give --yes for that", file=sys.stderr)
    for trainer in found.leaving if yes else []:
        folder = config.path / OFFLINE_FOLDER / trainer.name
        print(f"\n{folder} stays: before another trainer is to be named {trainer.name}, delete it", file=sys.stderr)


async def _collect(config: RunConfig, wanted: GcLimits, yes: bool, nothing: bool) -> GcPlan:
    if nothing:
        wanted = GcLimits(older_than_s=0.0, ledger=wanted.ledger)
    async with open_run(config, f"{config.run}.gc", OPERATOR) as history:
        collector = GarbageCollector(history.bus, history_settings(config))
        found = await collector.plan(wanted)
        if yes:
            await collector.collect(found)
        return found


def _print(found: GcPlan) -> None:
    rows: list[tuple[Any, ...]] = []
    for stream, decision in found.decisions.items():
        messages, size = found.totals[stream]
        if stream == LEDGER and not messages:
            rows.append((stream, None, None, None, None, "kept whole, unless --ledger"))
            continue
        rows.append(
            (stream, messages, human_bytes(size), decision.messages, human_bytes(decision.bytes), _why(decision))
        )
    going = {one.name for one in found.going}
    for one in found.revisions:
        gone = one.name in going
        messages, size = (one.messages, one.bytes) if gone else (0, 0)
        kept = None if gone else one.held
        rows.append((f"{REPLAY} {one.name}", one.messages, human_bytes(one.bytes), messages, human_bytes(size), kept))
    for trainer in found.trainers:
        there = trainer.messages, human_bytes(trainer.bytes)
        stays = (0, human_bytes(0), trainer.needs or "the record of it, unless --trainer")
        going_too = (*there, None)
        rows.append((f"{LEDGER} {trainer.name}", *there, *(going_too if trainer in found.leaving else stays)))
    print_table(("stream", "messages", "bytes", "go", "bytes", "the rest is kept for"), rows)


def _why(decision: GcDecision) -> str | None:
    """Say who keeps what should go, the greatest first."""
    held = sorted(decision.held.items(), key=lambda item: -item[1].bytes)
    reported = [f"{holder} ({human_bytes(one.bytes)} from {one.first} on)" for holder, one in held[:_MAX_NAMED_HOLDERS]]
    return "; ".join([*reported, *(["others"] if len(held) > _MAX_NAMED_HOLDERS else [])]) or None


def _size(messages: int, size: int) -> dict[str, int]:
    return {"messages": messages, "bytes": size}


def _plain(config: RunConfig, found: GcPlan, *, deleted: bool) -> dict[str, Any]:
    going = {one.name for one in found.going}
    return {
        "run": config.run,
        "deleted": deleted,
        "streams": {
            stream: {
                **_size(*found.totals[stream]),
                "go": {**_size(decision.messages, decision.bytes), "before": decision.before},
                "held": {
                    holder: {**_size(one.messages, one.bytes), "first": one.first}
                    for holder, one in decision.held.items()
                },
            }
            for stream, decision in found.decisions.items()
        },
        "revisions": {
            one.name: {**_size(one.messages, one.bytes), "goes": one.name in going, "held": one.held}
            for one in found.revisions
        },
        "trainers": {
            one.name: {
                **_size(one.messages, one.bytes),
                "goes": one in found.leaving,
                "revision": one.revision,
                "trained": one.trained,
                "batches": one.batches,
            }
            for one in found.trainers
        },
    }
