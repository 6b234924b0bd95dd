"""`lachesis runs delete`: all of a run that is over, shown, confirmed and deleted."""

import sys
from dataclasses import replace
from typing import Annotated

import anyio
import typer

from lachesis.pipeline.config.run import RunConfig
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.output import human_bytes, print_json, print_table
from lachesis.services.run.checkpoints import newest_checkpoint
from lachesis.services.run.deletion import RunContents, delete_run

__all__ = ["delete", "delete_named"]


@with_options
def delete(
    options: Options,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Name of the run, same as --run.")] = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Delete a finished run: its history, checkpoints, logs and folder. Lists them first, and asks.

    Safe to repeat: an interrupted deletion is completed. Foreign files in the folder stay.
    """
    delete_named(options if run is None else replace(options, run=run), yes=yes, as_json=as_json)


def delete_named(options: Options, *, yes: bool, as_json: bool) -> None:
    """Show what there is of the run that is named, and delete it once that is confirmed.

    Exits with 1 if it is not.
    """
    config = options.config_to_change("delete", asks=not yes, json=as_json)

    def confirm(contents: RunContents) -> bool:
        if not as_json:
            _show(contents, config)
        return yes or typer.confirm(f"delete all of run {config.run}?", err=True)

    contents, deleted = anyio.run(delete_run, config, confirm)
    if as_json:
        print_json(contents)
    elif deleted:
        print(f"run {config.run} was deleted{_kept(contents)}", file=sys.stderr)
    if not deleted:
        raise typer.Abort


def _show(contents: RunContents, config: RunConfig) -> None:
    rows = [(name, f"{one.messages} messages", human_bytes(one.bytes)) for name, one in contents.streams.items()]
    if contents.folder is not None:
        rows.append((contents.folder.path, f"{contents.folder.files} files", human_bytes(contents.folder.bytes)))
    print_table(("of run " + contents.run, "", "bytes"), rows)
    checkpoint = newest_checkpoint(config.path)
    if checkpoint is not None:
        print(f"its checkpoints go too, up to {checkpoint.name}: copy what is to be kept", file=sys.stderr)
    if contents.problem is not None:
        print(contents.problem, file=sys.stderr)
    if contents.folder is not None and contents.folder.kept:
        print(f"not of the run, and left there: {', '.join(contents.folder.kept)}", file=sys.stderr)


def _kept(contents: RunContents) -> str:
    folder = contents.folder
    return "" if folder is None or not folder.kept else f"; {folder.path} has other files, and stays"
