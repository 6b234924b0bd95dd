"""`lachesis load-check`: loads what a configuration names, in a process that may hang.

`doctor` and `up` start it.
"""

import os
import socket
import sys
from typing import Annotated

import typer

from lachesis.services.cli.options import Options, with_options
from lachesis.services.preflight.loading import write_findings
from lachesis.services.process.reaper import start_below_reaper

__all__ = ["load_check"]


@with_options
def load_check(
    options: Options,
    *,
    models: Annotated[bool, typer.Option("--models", help="Check the models, too.")] = False,
    prompts: Annotated[bool, typer.Option("--prompts", help="Look through the prompts, too.")] = False,
    reaper: Annotated[int | None, typer.Option("--reaper", hidden=True)] = None,
) -> None:
    """Load all that the configuration names, and print the results as JSON."""
    if reaper is not None:  # the loaded code may hang, and start processes
        start_below_reaper(socket.socket(fileno=reaper), 0.0, "lachesis reaper of load-check")
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the loaded code prints is no finding
        write_findings(options.config(), out, models=models, prompts=prompts)
