"""`lachesis export`: which rollouts, with the annotations of which revision, into which file."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import anyio
import typer

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.offline.archive.exporter import Exporter, ExportRequest, ExportSummary
from lachesis.pipeline.offline.archive.files import format_of
from lachesis.schemas.subjects import EVENTS
from lachesis.services.cli.history_options import SelectionOptions, with_selection
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.cli.progress import bar
from lachesis.services.output import human_bytes, print_json
from lachesis.services.run.connect import open_history
from lachesis.services.run.lost_history import warn_of_losses

__all__ = ["Format", "export"]


class Format(StrEnum):
    """What rollouts are written as."""

    parquet = "parquet"
    jsonl = "jsonl"


@with_options
@with_selection
def export(
    options: Options,
    wanted: SelectionOptions,
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write, *.parquet or *.jsonl, in an existing folder.")
    ],
    *,
    revision: Annotated[
        str, typer.Option(metavar="NAME", help="Revision of the scores: `live`, or the name of a replay.")
    ] = "live",
    kind: Annotated[Format | None, typer.Option("--format", help="File format. Default: by the file's name.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write rollouts with their scores, rewards, advantages and outcomes to a file, one row a sequence.

    `datasets.load_dataset("parquet", data_files=FILE)` loads it, and `lachesis import` takes it back.
    """
    config = options.config_with_environments()
    selection, groups = wanted.selection(config)
    request = ExportRequest(
        path=path,
        format=format_of(path, kind),
        revision=revision,
        selection=selection,
        groups=groups,
        overwrite=overwrite,
    )
    done = anyio.run(_run, config, request)
    if as_json:
        print_json(done)
    else:
        _print_summary(done)


async def _run(config: RunConfig, request: ExportRequest) -> ExportSummary:
    async with open_history(config, f"{config.run}.export", OPERATOR) as bus:
        await warn_of_losses(bus, config)
        with bar(f"export {request.revision}") as advance:
            return await Exporter(bus, config, request, advance).run()


def _print_summary(done: ExportSummary) -> None:
    print(f"{done.file}: {done.groups} groups, {done.rows} rows, {human_bytes(done.bytes)}, {done.seconds:.1f} s")
    if done.unscored:
        why = ""
        if EVENTS in done.kept_from:
            why = f"; annotations stored before sequence {done.kept_from[EVENTS]} of {EVENTS} were trimmed"
        print(f"{done.unscored} groups have no score in revision {done.revision}{why}", file=sys.stderr)
    for reason in done.reasons:
        print(f"left out: {reason}", file=sys.stderr)
    if done.left_out > len(done.reasons):
        print(f"left out: {done.left_out - len(done.reasons)} more", file=sys.stderr)
