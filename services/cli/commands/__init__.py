"""The command line: every command, in the order in which the help lists them.

What a command takes and says in its help is in the module of its group here; what it does is in the module of
`services.cli` that it imports when it is called.
"""

from typing import Annotated

import typer

from lachesis import __version__
from lachesis.services.cli.commands import auth, checking, dead, history, reference, revisions, running, watching

__all__ = ["app"]

_HELP = """Event-driven rollout pipeline for reinforcement learning of language models.

`lachesis up` runs everything; `lachesis run NAME` runs one service; `top`, `trace`, `status`, `tail` and
`doctor` look at it."""

app = typer.Typer(
    name="lachesis", help=_HELP, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lachesis {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command()(running.up)
app.command()(running.run)
app.command(hidden=True)(running.forkserver)
app.command(hidden=True)(checking.load_check)
app.command()(running.demo)
app.command()(running.dev)
app.command()(running.init)
app.command()(watching.status)
app.command()(watching.top)
app.command()(watching.trace)
app.command()(watching.health)
app.command()(watching.resume)
app.command()(revisions.replay)
app.command()(revisions.promote)
app.command()(revisions.train)
app.command()(revisions.compare)
app.command()(history.export)
app.command()(history.gc)
app.command()(history.delete)
app.command("import")(history.import_)
app.command()(watching.tail)
app.command()(reference.schema)
app.command()(checking.verify)
app.command()(checking.reproduce)
app.command()(checking.doctor)
app.add_typer(reference.env_app, name="env")
app.add_typer(dead.dead_app, name="dead")
app.add_typer(reference.config_app, name="config")
app.add_typer(auth.auth_app, name="auth")
app.add_typer(revisions.shadow_app, name="shadow")
