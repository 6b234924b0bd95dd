"""Commands that check: `doctor` the machine and the server, `verify` the numbers, `reproduce` a trainer's work."""

from typing import Annotated

import typer

from lachesis.services.cli.options import Json, Options, with_options

__all__ = ["doctor", "load_check", "reproduce", "verify"]


@with_options
def doctor(options: Options, as_json: Json = False) -> None:
    """Check this machine and the server, and say how to mend what is wrong. Exits with 1 if something is."""
    from lachesis.services.cli.doctor import run_doctor

    run_doctor(options, as_json=as_json)


@with_options
def load_check(options: Options) -> None:
    """Load what the configuration names, and write what became of it to standard output, as JSON."""
    import os
    import signal
    import sys

    from lachesis.pipeline.bus.embedded import die_with_parent
    from lachesis.services.preflight.loading import write_findings

    arm = die_with_parent(signal.SIGKILL, parent=os.getppid())  # the loaded code may hang
    if arm is not None:
        arm()
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the loaded code prints is no finding
        write_findings(options.config(), out)


@with_options
def verify(
    options: Options,
    groups: Annotated[int, typer.Option(min=1, help="Newest recorded groups to verify with.")] = 32,
    runs: Annotated[int, typer.Option(min=2, help="Times that each sample is rated.")] = 3,
    atol: Annotated[float, typer.Option(min=0.0, help="Difference between two ratings that is none.")] = 1e-6,
    as_json: Json = False,
) -> None:
    """Check on recorded rollouts that raters, advantages and the loss are numerically sound; exit with 1 if not."""
    from lachesis.services.cli.verify import verify_run

    verify_run(options, groups=groups, runs=runs, atol=atol, as_json=as_json)


@with_options
def reproduce(
    options: Options,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="The run, as --run.")] = None,
    *,
    trainer: Annotated[
        str | None, typer.Option(metavar="NAME", help="A trainer on past rollouts. Default: the live one.")
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="STEP", help="Kept checkpoint to begin with. Default: the model, at step 0."),
    ] = None,
    end: Annotated[
        int | None, typer.Option("--to", min=1, metavar="STEP", help="Last step. Default: the last one reported.")
    ] = None,
    batches_only: Annotated[bool, typer.Option("--batches-only", help="Verify batches, and train nothing.")] = False,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="On another machine: distance of weights, as a share of how far they moved.")
    ] = 0.05,
    as_json: Json = False,
) -> None:
    """Rebuild a run from its streams: the same batches in the same order, and from a checkpoint the same weights.

    Reads only, while the run goes on or after it has ended. Exits with 1 if anything is not what was recorded.
    """
    from dataclasses import replace

    from lachesis.services.cli.reproduce import Wish, reproduce_run

    chosen = options if run is None else replace(options, run=run)
    wish = Wish(trainer=trainer, begin=begin, end=end, batches_only=batches_only, tolerance=tolerance)
    reproduce_run(chosen, wish, as_json=as_json)
