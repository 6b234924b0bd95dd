"""Commands that start a run or a part of it: `up`, `run`, `init`, `demo`, `dev`."""

from pathlib import Path
from typing import Annotated

import typer

from lachesis.services.cli.options import Options, with_options

__all__ = ["demo", "dev", "forkserver", "init", "run", "up"]


@with_options
def up(options: Options) -> None:
    """Run everything: the server, unless one is named, and every service, in order, until Ctrl-C or the last step."""
    from lachesis.services.cli.up import run_up

    run_up(options)


def _services(incomplete: str) -> list[str]:
    from lachesis.services.registry import SERVICES

    return [name for name in SERVICES if name.startswith(incomplete)]


@with_options
def run(
    options: Options,
    service: Annotated[str | None, typer.Argument(help="Service; none: list them.", autocompletion=_services)] = None,
    part: Annotated[str, typer.Argument(help="Its part: an environment, or the role of an inference server.")] = "",
    replica: Annotated[
        int | None, typer.Option(min=1, help="Number of this replica; default 1, in containers the host's name.")
    ] = None,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:
    """Run one service until it is told to stop, or list the services."""
    from lachesis.services.cli.run import list_services, run_service

    if service is None:
        list_services()
    else:
        run_service(options, service, part, replica=replica, supervised=supervised)


@with_options
def forkserver(
    options: Options, kind: Annotated[str, typer.Argument()], door: Annotated[Path, typer.Argument()]
) -> None:
    """Fork services that the supervisor asks for."""
    from lachesis.services.cli.run import run_service
    from lachesis.services.forkserver import end_at_once, serve_forks

    told = serve_forks(kind, door)
    if told is not None:
        with end_at_once():
            run_service(options, told.service, told.part, replica=told.replica, supervised=True)


@with_options
def init(options: Options) -> None:
    """Create the run's streams and bucket on the server, or change them to fit the configuration. Safe to repeat."""
    from lachesis.services.cli.init import run_init

    run_init(options)


def demo(
    *,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model, its warm start and the run.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    run_name: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Name of the run.")] = None,
    folder: Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder; default runs/NAME.")] = None,
    nats: Annotated[str | None, typer.Option(metavar="URL", help="Use this NATS server.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set one value; may be given again.")
    ] = None,
    shuffle_advantages: Annotated[
        bool, typer.Option("--shuffle-advantages", help="A control, which must not learn.")
    ] = False,
    gate: Annotated[bool, typer.Option(help="Fail unless the held-out pass rate rises by 20 points.")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Make the model anew, whatever is cached.")] = False,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds after which the demo has failed.")] = 600.0,
) -> None:
    """Train a small model on real tasks with everything running, and judge by held-out tasks whether it learned."""
    from lachesis.services.cli.demo import run_demo_command
    from lachesis.services.demo.settings import DemoOptions

    run_demo_command(
        DemoOptions(
            seed=seed,
            steps=steps,
            run=run_name,
            folder=folder,
            nats=nats,
            sets=tuple(sets or ()),
            shuffle_advantages=shuffle_advantages,
            gate=gate,
            fresh=fresh,
            deadline_s=deadline,
        )
    )


@with_options
def dev(
    options: Options,
    env: Annotated[str, typer.Argument(help="Environment of the configuration.")],
    task: Annotated[int, typer.Option(min=0, help="Index of the task in the environment's pool.")] = 0,
) -> None:
    """Take one trip from a task to an optimizer step in this process, without a server; for breakpoints.

    Exits with 1 where there is nothing to train on.
    """
    import anyio

    from lachesis.services.cli.output import SafeConsole
    from lachesis.services.dev import run_dev

    if not anyio.run(run_dev, options.config(), env, task, SafeConsole()):
        raise typer.Exit(1)
