"""`lachesis plan`: the memory of an optimizer step, or what a load of groups takes, beforehand."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.output import human_bytes, human_number, human_seconds, print_json, print_table

if TYPE_CHECKING:
    from lachesis.services.run.load_plan import LoadPlan
    from lachesis.services.run.memory_plan import StepPlan

__all__ = ["plan"]

_PARTS = {
    "weights": "float32",
    "reference": "the model that training.learner.loss.kl_coef keeps the policy near to",
    "gradients": "float32, of what is trained",
    "moments": "AdamW's two, float32",
    "activations": "what layers keep for the backward pass, logits and temporaries, at the peak",
    "kept": "blocks that are freed and that the C library keeps: the most that was measured, 60 % of the above",
    "copies": "weights to publish and a checkpoint's tensors, while the next step is taken: the most there can be",
    "process": "libraries, and on a GPU its context: an estimate",
}
_LOAD = "A load, with --groups-per-s"


@with_options
def plan(  # noqa: PLR0917 - options of the command line
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
    groups_per_s: Annotated[
        float | None,
        typer.Option(
            min=0.001, metavar="N", help="Plan a load of so many groups a second instead.", rich_help_panel=_LOAD
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="SAMPLESxTOKENS",
            help="Samples of a group and tokens of each, such as 8x1024. Default: the largest environment's.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    raters: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Default: the configuration's.", rich_help_panel=_LOAD)
    ] = None,
    teacher_top_k: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=100,
            metavar="K",
            help="A teacher that stores so many likeliest tokens a position. Default: the configuration's.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    retention: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long history is kept: seconds, 30m, 24h or 7d. Default: as long as the budget of ROLLOUTS lasts.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=5,
            metavar="N",
            help="Copies of each stream: 1, 3 or 5. Default: the configuration's.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Cores of a node. Default: this machine's.", rich_help_panel=_LOAD),
    ] = None,
    machine_factor: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            metavar="X",
            help="Processor time of your machine by that of the machine of the measurements. Default: measured here, "
            "in a second.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say how many bytes an optimizer step takes. Exits with 1 where the device has fewer.

    The settings that help are named. Weights are not loaded. A step has the longest sequences that the
    environments allow.

    With --groups-per-s: say what a pipeline of that load takes, namely bytes of each stream, disk, network, processor
    time, processes and nodes, and what is full first. Exits with 1 where that is full below the load.
    """  # fmt: skip
    load_options = {
        "--tokens": tokens, "--raters": raters, "--teacher-top-k": teacher_top_k, "--retention": retention,
        "--replicas": replicas, "--cores": cores, "--machine-factor": machine_factor,
    }  # fmt: skip
    if groups_per_s is None:
        _refuse(load_options, "of a load: give --groups-per-s with it")
        from lachesis.services.run.memory_plan import plan_step

        step = plan_step(options.config(), model=model, device=device, memory=memory)
        print_json(step) if as_json else _print_step(step)
        sys.exit(0 if step.fits else 1)
    _refuse(
        {"--model": model, "--device": device, "--memory": memory}, "of an optimizer step: leave out --groups-per-s"
    )
    from lachesis.services.run.load_settings import plan_configured_load

    load = plan_configured_load(
        options.config(), groups_per_s, tokens=tokens, raters=raters, teacher_top_k=teacher_top_k,
        retention=retention, replicas=replicas, cores=cores, machine_factor=machine_factor,
    )  # fmt: skip
    print_json(load) if as_json else _print_load(load)
    sys.exit(0 if load.fits else 1)


def _refuse(given: Mapping[str, object], why: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise typer.BadParameter(f"{name} is {why}")


def _print_step(found: "StepPlan") -> None:
    rows = [(name, human_bytes(value), f"{value:,}", _PARTS[name]) for name, value in found.parts.items() if value]
    print_table(("", "size", "bytes", "of"), [*rows, ("in all", human_bytes(found.total), f"{found.total:,}", "")])
    print(found.text)
    for line in (*found.cures, *found.notes):
        print(line)


def _print_load(found: "LoadPlan") -> None:
    print(f"{found.groups_per_s:g} groups/s, {human_number(found.tokens_per_s)} tokens/s")
    print()
    hours = found.retention_s / 3600
    kept = f"kept for {human_seconds(found.retention_s) if hours < 1 else f'{hours:,.3g} h'}"
    print_table(
        ("stream", "a group", "a second", kept, "room"),
        [
            (one.name, *map(_size, (one.bytes_per_group, one.bytes_per_s, one.kept, one.room)))
            for one in found.streams
        ],
    )  # fmt: skip
    print(f"disk: {_size(found.disk_in_all)} in all, {_size(found.disk_per_node)} a node")
    network = found.network
    print(
        f"network at the servers: {_size(network.total)}/s (published {_size(network.published)}, "
        f"delivered {_size(sum(network.delivered.values()))}, copied {_size(network.replicated)})"
    )
    print()
    print_table(
        ("process", "number", "CPU ms a group", "cores in all", "busy", "full at groups/s"),
        [
            (
                one.name, one.count, f"{one.cpu_ms_per_group:.2f}", f"{one.cpu_s_per_s:.2f}", f"{one.utilisation:.0%}",
                "start more" if one.full_at is None else f"{one.full_at:,.0f}",
            )
            for one in (*found.processes, *found.leaders)
        ],
    )  # fmt: skip
    print(f"in all {found.cpu_s_per_s:.2f} cores (a leader is part of nats-server), nodes: {found.nodes}")
    print()
    print(found.text)
    for line in found.cures:
        print(f"what helps: {line}")
    for line in found.settings:
        print(f"set: {line}")
    for line in found.notes:
        print(line)


def _size(value: float) -> str:
    return human_bytes(int(value))
