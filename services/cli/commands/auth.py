"""Commands for keys and permissions: `auth init`, `auth show`."""

from pathlib import Path
from typing import Annotated

import typer

from lachesis.services.cli.options import Json, Options, with_options

__all__ = ["auth_app"]

auth_app = typer.Typer(help="Keys and permissions for a server of one's own.", no_args_is_help=True)


@auth_app.command("init")
@with_options
def auth_init(
    options: Options,
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the server's configuration.")] = Path(
        "deploy/nats"
    ),
    force: Annotated[bool, typer.Option("--force", help="Make new keys in place of those that exist.")] = False,
    cert: Annotated[Path | None, typer.Option(metavar="FILE", help="The server's certificate, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ask clients for certificates of this authority, PEM.")
    ] = None,
) -> None:
    """Write an nkey for each service and permissions that allow it its work and nothing else. Safe to repeat."""
    from lachesis.services.cli.auth import run_auth_init, server_tls

    run_auth_init(options, out, force=force, tls=server_tls(cert, key, client_ca))


@auth_app.command("show")
@with_options
def auth_show(options: Options, as_json: Json = False) -> None:
    """Show who may do what; with --json, the subjects that the server allows and denies."""
    from lachesis.services.cli.auth import show_auth

    show_auth(options, as_json=as_json)
