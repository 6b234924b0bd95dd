"""`lachesis plan`: the bytes that an optimizer step takes, beforehand, and whether a device has them."""

import sys
from typing import Annotated, Any

import typer

from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.output import human_bytes, print_json, print_table

__all__ = ["plan"]

_PARTS = {
    "weights": "float32",
    "reference": "the model that training.learner.loss.kl_coef keeps the policy near to",
    "gradients": "float32, of what is trained",
    "moments": "AdamW's two, float32",
    "activations": "what layers keep for the backward pass, logits and temporaries, at the peak",
    "copies": "weights to publish and a checkpoint's tensors, while the next step is taken: the most there can be",
    "process": "libraries, and on a GPU its context: an estimate",
}


@with_options
def plan(
    options: Options,
    model: Annotated[
        str | None, typer.Option(metavar="M", help="Folder or id of the model. Default: the run's.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="D", help="cpu, cuda or cuda:N. Default: the trainer's.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.1, metavar="GB", help="Memory of a device that is not here, in 10^9 bytes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say how many bytes an optimizer step takes. Exits with 1 where the device has fewer.

    The settings that help are named. Weights are not loaded. A step has the longest sequences that the
    environments allow.
    """
    from lachesis.services.run.memory_plan import plan_step

    found = plan_step(options.config(), model=model, device=device, memory=memory)
    if as_json:
        print_json(found)
    else:
        _print(found)
    sys.exit(0 if found.fits else 1)


def _print(found: Any) -> None:
    rows = [(name, human_bytes(value), f"{value:,}", _PARTS[name]) for name, value in found.parts.items() if value]
    print_table(("", "size", "bytes", "of"), [*rows, ("in all", human_bytes(found.total), f"{found.total:,}", "")])
    print(found.text)
    for line in (*found.cures, *found.notes):
        print(line)
