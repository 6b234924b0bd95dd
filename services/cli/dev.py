"""`lachesis dev`: one trip from a task to an optimizer step, in this process."""

from functools import partial
from typing import Annotated

import typer

from lachesis.services.cli.options import Options, with_options
from lachesis.services.output import SafeConsole

__all__ = ["dev"]


@with_options
def dev(
    options: Options,
    env: Annotated[str, typer.Argument(help="Environment of the configuration.")],
    task: Annotated[int, typer.Option(min=0, help="Index of the task in the environment's pool.")] = 0,
) -> None:
    """Run one task through all stages to an optimizer step in this process, without a server.

    For debugging with breakpoints: while you stand at one, no time limit runs out. Exits with 1 if there is nothing to
    train on.
    """
    from lachesis.services.dev.debugging import run_for_breakpoints
    from lachesis.services.dev.one_group import run_dev  # imports torch

    code = run_for_breakpoints(partial(run_dev, options.config(), env, task, SafeConsole()))
    if code:
        raise typer.Exit(code)
