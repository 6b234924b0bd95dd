"""Commands for messages that could not be handled: `dead list`, `dead show`, `dead requeue`."""

from typing import Annotated

import typer

from lachesis.services.cli.options import Json, Options, with_options

__all__ = ["dead_app"]

dead_app = typer.Typer(help="Messages that could not be handled.", no_args_is_help=True)


@dead_app.command("list")
@with_options
def dead_list(options: Options, as_json: Json = False) -> None:
    """List the run's dead letters."""
    from lachesis.services.cli.dead import list_dead

    list_dead(options, as_json=as_json)


@dead_app.command("show")
@with_options
def dead_show(
    options: Options, seq: Annotated[int, typer.Argument(min=1, help="Sequence, as `dead list` prints it.")]
) -> None:
    """Show one dead letter and the message it is about, as JSON."""
    from lachesis.services.cli.dead import show_dead

    show_dead(options, seq)


@dead_app.command("requeue")
@with_options
def dead_requeue(
    options: Options,
    letters: Annotated[
        list[int] | None, typer.Argument(metavar="LETTER", help="Sequences, as `dead list` prints them.")
    ] = None,
    *,
    env: Annotated[str | None, typer.Option(help="Only of this environment.")] = None,
    stage: Annotated[str | None, typer.Option(help="Only what this stage could not handle.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only data, poison or deadline.")] = None,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Only where the reason holds this.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for each rollout's admission.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Put dead-lettered messages back after a fix: rollouts as new ones, annotations as they were. Safe to repeat."""
    from lachesis.services.cli.dead import Selection, requeue_dead

    chosen = Selection(frozenset(letters or ()), env, stage, kind, reason, everything)
    requeue_dead(options, chosen, dry_run=dry_run, yes=yes, wait_s=wait, as_json=as_json)
