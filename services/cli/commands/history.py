"""Commands that take rollouts out, put them in and delete them: `export`, `import`, `gc`, `delete`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.cli.selection import Wanted, with_selection

__all__ = ["delete", "export", "gc", "import_"]


class Format(StrEnum):
    """What rollouts are written as."""

    parquet = "parquet"
    jsonl = "jsonl"


@with_options
@with_selection
def export(
    options: Options,
    wanted: Wanted,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="*.parquet or *.jsonl; its folder has to exist.")],
    *,
    revision: Annotated[
        str, typer.Option(metavar="NAME", help="Whose scores: `live`, or what a replay wrote.")
    ] = "live",
    kind: Annotated[Format | None, typer.Option("--format", help="Default: as the name of the file says.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write rollouts with their scores, rewards, advantages and outcomes to a file, one row a sequence.

    `datasets.load_dataset("parquet", data_files=FILE)` loads it, and `lachesis import` takes it back.
    """
    from lachesis.services.cli.export import export_history

    export_history(options, path, wanted, revision=revision, kind=kind, overwrite=overwrite, as_json=as_json)


@with_options
def import_(
    options: Options,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="What `export` or Atropos wrote.")],
    *,
    atropos: Annotated[bool, typer.Option("--atropos", help="The files are JSON lines of Atropos.")] = False,
    env: Annotated[str | None, typer.Option(help="Atropos: the environment that its groups are of.")] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Atropos: what made them, STEP-LINEAGE-DIGEST, if known.")
    ] = None,
    tokenizer_hash: Annotated[str | None, typer.Option(metavar="HASH", help="Atropos: of their tokenizer.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out, and tell, what cannot be stored.")] = False,
    unleased: Annotated[
        bool, typer.Option("--unleased", help="The run has no governor to ask; keep within the byte budgets.")
    ] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for each group's admission.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Store rollouts from files in the run, under their own ids. Safe to repeat: what is stored already is passed over.

    Only rollouts come back; the run, or `lachesis replay`, scores them anew. A run that does not exist is made.
    """
    from lachesis.services.cli.imports import Foreign, import_files

    if not atropos and (env or policy or tokenizer_hash):
        raise typer.BadParameter("--env, --policy and --tokenizer-hash are for files of Atropos: give --atropos")
    foreign = Foreign(env, policy, tokenizer_hash) if atropos else None
    import_files(options, files, foreign, skip_bad=skip_bad, unleased=unleased, wait_s=wait, as_json=as_json)


@with_options
def gc(
    options: Options,
    *,
    older_than: Annotated[str | None, typer.Option(metavar="AGE", help="What is older goes: 12h, 7d.")] = None,
    keep_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The oldest goes until a stream has no more: 2GiB.")
    ] = None,
    revision: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="This re-scored revision goes; may be given again.")
    ] = None,
    trainer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="This trainer on the past goes, done or not; its checkpoints stay."),
    ] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="The ledger's beginning too; what it says is lost then.")
    ] = False,
    consumers: Annotated[
        bool, typer.Option("--consumers", help="Readers that the server keeps; those in use are made again.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete it; else it is only shown.")] = False,
    as_json: Json = False,
) -> None:
    """Show, or delete, what of the run's history nobody needs: no reader, no hold, no checkpoint to resume from.

    The governor of a run makes room by itself; this is for what should not be kept, and for what it never trims:
    evaluations, revisions, the ledger. Safe beside it, and to repeat. `lachesis delete` deletes a whole run.
    """
    from lachesis.services.cli.consumers import collect_consumers
    from lachesis.services.cli.gc import collect_garbage, limits

    if consumers and (older_than or keep_bytes or revision or trainer or ledger):
        raise typer.BadParameter("--consumers goes with no other option but --yes and --json")
    if consumers:
        collect_consumers(options, yes=yes, as_json=as_json)
    else:
        wanted = limits(older_than, keep_bytes, revision or [], trainer or [], ledger=ledger)
        collect_garbage(options, wanted, yes=yes, as_json=as_json)


@with_options
def delete(
    options: Options,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="The run, as --run.")] = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete a run that is over: its history, checkpoints, logs and folder. Shows what goes, and asks.

    Safe to repeat: one that was interrupted is finished. What is in the folder and not of the run stays.
    """
    from dataclasses import replace

    from lachesis.services.cli.delete import delete_named

    delete_named(options if run is None else replace(options, run=run), yes=yes, as_json=as_json)
