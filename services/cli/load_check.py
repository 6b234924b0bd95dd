"""`lachesis load-check`: loads what a configuration names, in a process that may hang.

`doctor` and `up` start it.
"""

import os
import signal
import sys
from typing import Annotated

import typer

from lachesis.pipeline.bus.embedded import die_with_parent
from lachesis.services.cli.options import Options, with_options
from lachesis.services.preflight.loading import write_findings

__all__ = ["load_check"]


@with_options
def load_check(
    options: Options,
    *,
    models: Annotated[bool, typer.Option("--models", help="Check the models, too.")] = False,
    prompts: Annotated[bool, typer.Option("--prompts", help="Look through the prompts, too.")] = False,
) -> None:
    """Load all that the configuration names, and print the results as JSON."""
    arm = die_with_parent(signal.SIGKILL, parent=os.getppid())  # the loaded code may hang
    if arm is not None:
        arm()
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the loaded code prints is no finding
        write_findings(options.config(), out, models=models, prompts=prompts)
