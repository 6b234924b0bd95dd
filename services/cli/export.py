"""`lachesis export`: which rollouts, with the annotations of which revision, into which file."""

import sys
from pathlib import Path

import anyio

from lachesis.pipeline.archive.export import Exported, Exporter, Request
from lachesis.pipeline.archive.files import format_of
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.access import OPERATOR
from lachesis.schemas.subjects import EVENTS
from lachesis.services.cli.options import Options
from lachesis.services.cli.progress import bar
from lachesis.services.cli.selection import Wanted
from lachesis.services.output import human_bytes, print_json
from lachesis.services.run.connect import open_history

__all__ = ["export_history"]


def export_history(
    options: Options, path: Path, wanted: Wanted, *, revision: str, kind: str | None, overwrite: bool, as_json: bool
) -> None:
    """Write the selection to `path` and say what was written."""
    config = options.config_with_environments()
    selection, groups = wanted.selection(config)
    request = Request(
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
        _tell(done)


async def _run(config: RunConfig, request: Request) -> Exported:
    async with open_history(config, f"{config.run}.export", OPERATOR) as bus:
        with bar(f"export {request.revision}") as tell:
            return await Exporter(bus, config, request, tell).run()


def _tell(done: Exported) -> None:
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
