"""`lachesis run`: one service in this process."""

import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from lachesis.pipeline.runtime.exit_note import is_supervised_by_socket, note_exit
from lachesis.schemas.errors import LachesisError
from lachesis.services.cli.options import Options, with_options
from lachesis.services.output import print_table
from lachesis.services.process.reaper import start_below_reaper
from lachesis.services.process.role import ProcessRole
from lachesis.services.process.service_process import EXIT_STARTUP, run_process
from lachesis.services.registry import services
from lachesis.services.supervisor.forkserver import end_at_once, serve_forks

__all__ = ["forkserver", "list_services", "run", "run_service"]


def _services(incomplete: str) -> list[str]:
    return [name for name in services() if name.startswith(incomplete)]


@with_options
def run(
    options: Options,
    service: Annotated[
        str | None,
        typer.Argument(
            help="Name of the service, or of several that share the process: batcher+normalizer. Without it, the "
            "services are listed.",
            autocompletion=_services,
        ),
    ] = None,
    part: Annotated[
        str, typer.Argument(help="Part of the service: an environment, or the role of an inference server.")
    ] = "",
    replica: Annotated[
        int | None,
        typer.Option(min=1, help="Number of this replica. Default: the host's name; the second here is HOST-2."),
    ] = None,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
    *,
    reaper: Annotated[str, typer.Option("--reaper", hidden=True)] = "",
) -> None:
    """Run one service until it is stopped, or list the services."""
    if reaper and service is not None:
        channel, _, limit_s = reaper.partition(":")
        title = " ".join(filter(None, ("lachesis reaper of", service, part)))
        start_below_reaper(socket.socket(fileno=int(channel)), float(limit_s), title)
    if service is None:
        list_services()
    else:
        run_service(options, service, part, replica=replica, supervised=supervised)


@with_options
def forkserver(
    options: Options, kind: Annotated[str, typer.Argument()], door: Annotated[Path, typer.Argument()]
) -> None:
    """Fork services on the supervisor's request."""
    reported = serve_forks(kind, door, options.load)
    if reported is not None:
        with end_at_once():
            run_service(options, reported.service, reported.part, replica=reported.replica, supervised=True)


def list_services() -> None:
    """Print the services with what they do and the extra they need."""
    rows = [(spec.name, spec.about, f"lachesis-rl[{spec.extra}]" if spec.extra else "") for spec in services().values()]
    print_table(("service", "what it does", "needs"), rows)


def run_service(options: Options, service: str, part: str, *, replica: int | None, supervised: bool) -> None:
    """Run until drained; exits with the code of `run_process`."""
    try:
        role, config = ProcessRole.of(service, part, replica, supervised=supervised), options.config()
    except LachesisError:
        if supervised and is_supervised_by_socket():
            note_exit(EXIT_STARTUP)  # `main` says why
        raise
    sys.exit(run_process(role, config))
