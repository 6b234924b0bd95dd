"""Says on which device the trainer and each reference server compute, and why."""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.config.run import THIS_MACHINE, RunConfig
from lachesis.pipeline.inference.engine_table import engines_that
from lachesis.schemas.errors import ConfigError
from lachesis.services.planned_processes import planned_processes

__all__ = ["describe_devices", "devices_here"]


def devices_here(config: RunConfig) -> str:
    """Say where the run's models compute on this machine."""
    try:
        import torch
    except ModuleNotFoundError:
        return f"not known: needs torch; {install_command('train')}"
    return describe_devices(config, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def describe_devices(config: RunConfig, gpus: int) -> str:
    """Say where the run's models compute on a machine on which torch sees so many GPUs.

    Raises `ConfigError` where a setting names a GPU that is not among these.
    """
    places = dict(_places(config, gpus))
    if not places:
        return "no model of this run computes here"
    seen = "no GPU" if not gpus else "one GPU" if gpus == 1 else f"{gpus} GPUs"
    absent = [f"{setting} is {chosen!r}" for setting, (chosen, where) in places.items() if _index(where) >= gpus]
    if absent:
        raise ConfigError(f"{', '.join(absent)}, and torch sees {seen} here" + (", counted from 0" if gpus else ""))
    parts = [f"{setting} = {chosen!r}: {where}" for setting, (chosen, where) in places.items()]
    text = f"torch sees {seen} here; {'; '.join(parts)}"
    cards = {setting: where for setting, (_, where) in places.items() if where != "cpu"}
    trained = cards.pop("training.device", None)
    if trained in cards.values():
        text += "; trainer and servers share that GPU's memory"
        if config.weights.transport != "shared_memory":
            text += ', and with weights.transport = "shared_memory" weights reach the policy\'s server without a file'
    if gpus and "inference.policy.device" in places:
        text += f"; {engines_that(lambda spec: not spec.loads_here)} would sample several times as fast"
    elif not gpus:
        text += "; with a GPU both training and sampling are some 20 times as fast"
    return text


def _places(config: RunConfig, gpus: int) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield by setting what it says and the device that it means, of what computes with torch here."""
    training = config.training
    if config.mode == "train" and training.backend == THIS_MACHINE:
        yield "training.device", (training.device, _device(training.device, gpus, first=True))
    for row in planned_processes(config):
        if row.service == "inference" and config.trains_elsewhere("inference", row.part) is None:
            settings = config.role(row.part)
            if settings.spec.loads_here:
                chosen = settings.device
                yield f"inference.{row.part}.device", (chosen, _device(chosen, gpus, first=False))


def _index(device: str) -> int:
    """Return the number of a GPU, -1 for the CPU."""
    kind, _, number = device.partition(":")
    return int(number) if kind == "cuda" else -1


def _device(setting: str, gpus: int, *, first: bool) -> str:
    if setting == "auto":
        return f"cuda:{0 if first else gpus - 1}" if gpus else "cpu"
    return "cuda:0" if setting == "cuda" else setting
