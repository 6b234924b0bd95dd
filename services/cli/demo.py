"""`lachesis demo`: the whole pipeline on real tasks, measured by what it learned."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = ["demo"]


def demo(
    *,
    model: Annotated[
        Literal["tiny", "smollm2"],
        typer.Option(help="tiny: made on the spot, spells words. smollm2: a pretrained language model, does sums."),
    ] = "tiny",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model, its warm start and the run.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    run_name: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Name of the run.")] = None,
    folder: Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder; default runs/NAME.")] = None,
    nats: Annotated[str | None, typer.Option(metavar="URL", help="Use this NATS server.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set one value. Repeatable.")] = None,
    shuffle_advantages: Annotated[
        bool, typer.Option("--shuffle-advantages", help="Shuffle advantages: a control run, which must not learn.")
    ] = False,
    distill: Annotated[
        bool, typer.Option("--distill", help="Learn from a better teacher too: on-policy distillation. tiny only.")
    ] = False,
    gate: Annotated[bool, typer.Option(help="Fail unless the held-out pass rate rises by 20 points.")] = True,
    save_model: Annotated[
        Path | None, typer.Option("--save-model", metavar="DIR", help="Write the model to this new folder, and end.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Build the model again and ignore the cache.")] = False,
    deadline: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds after which the demo counts as failed; default 600, 1200 for smollm2."),
    ] = None,
) -> None:
    """Train a model on real tasks with the whole pipeline, and check that it learned."""
    from lachesis.services.demo.run import run_demo, save_model_folder  # takes what the extra `demo` installs
    from lachesis.services.demo.settings import DEADLINES_S, DemoOptions

    options = DemoOptions(
        model=model,
        seed=seed,
        steps=steps,
        run=run_name,
        folder=folder,
        nats=nats,
        sets=tuple(sets or ()),
        shuffle_advantages=shuffle_advantages,
        distill=distill,
        gate=gate,
        fresh=fresh,
        deadline_s=deadline or DEADLINES_S[model],
    )
    sys.exit(run_demo(options) if save_model is None else save_model_folder(options, save_model))
