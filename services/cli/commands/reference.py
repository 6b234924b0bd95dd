"""Commands that say what there is: environments (`env`), settings (`config`), messages (`schema`)."""

from pathlib import Path
from typing import Annotated

import typer

from lachesis.services.cli.options import Json, Options, with_options

__all__ = ["config_app", "env_app", "schema"]

env_app = typer.Typer(help="Environments.", no_args_is_help=True)
config_app = typer.Typer(help="The configuration.", no_args_is_help=True)


@env_app.command("list")
def env_list(as_json: Json = False) -> None:
    """List the built-in environments and the tasks they offer."""
    from lachesis.services.cli.environments import list_environments

    list_environments(as_json=as_json)


@config_app.command("show")
@with_options
def config_show(options: Options, as_json: Json = False) -> None:
    """Show every setting: its value, where the value comes from, and what it means."""
    from lachesis.services.cli.settings import show_settings

    show_settings(options, as_json=as_json)


def schema(
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write every file there (for --check: read).")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if DIR (deploy/schema) differs.")] = False,
) -> None:
    """Print the AsyncAPI document, or write it and the JSON Schemas to a folder."""
    from lachesis.services.cli.schema import run_schema

    run_schema(out, check=check)
