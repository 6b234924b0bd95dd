"""The configuration of a run with the settings of all installed extensions."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from lachesis.pipeline.config.load import field_descriptions
from lachesis.pipeline.config.run import THIS_MACHINE, EnvironmentConfig, RunConfig, TrainingConfig
from lachesis.pipeline.extension import Setting, added, call_each, extensions, with_added
from lachesis.pipeline.inference.config import InferenceConfig
from lachesis.pipeline.inference.engine_table import DEFAULT_ENGINE, engines

__all__ = ["environment_config_type", "inference_config_type", "run_config_type", "training_config_type"]

_TRAINING = "training."


@functools.cache
def training_config_type() -> type[TrainingConfig]:
    """Return the type of [training] with what extensions add to it."""
    trainers = tuple(with_added("trainers", {THIS_MACHINE: None}))
    texts = "".join(f" {name}: {one.about}." for one in extensions().values() for name in one.trainers)
    backend = Setting(Literal[trainers], THIS_MACHINE, f"What trains. torch: this machine.{texts} Default torch.")
    further = {path.removeprefix(_TRAINING): one for path, one in _settings().items() if path.startswith(_TRAINING)}
    return _extended(TrainingConfig, training_config_type, {"backend": backend, **further}, {})


@functools.cache
def environment_config_type() -> type[EnvironmentConfig]:
    """Return the type of [environments.NAME], which knows the paths in parameters of all kinds."""
    further = {name: kind.param_paths for name, kind in added("environments").items() if kind.param_paths}
    return _extended(
        EnvironmentConfig, environment_config_type, {}, {"PARAM_PATHS": EnvironmentConfig.PARAM_PATHS | further}
    )


@functools.cache
def inference_config_type() -> type[InferenceConfig]:
    """Return the type of [inference.ROLE], whose `kind` is one of the engines that there are."""
    kind = Setting(Literal[tuple(engines())], DEFAULT_ENGINE, field_descriptions(InferenceConfig)["kind"])
    return _extended(InferenceConfig, inference_config_type, {"kind": kind}, {})


@functools.cache
def run_config_type() -> type[RunConfig]:
    """Return the type of a run's configuration with what extensions add to it."""
    training, environments = training_config_type(), dict[str, environment_config_type()]  # type: ignore[misc]
    described, inference = field_descriptions(RunConfig), inference_config_type()
    own = {
        "inference": Setting(dict[str, inference], {}, described["inference"]),  # type: ignore[valid-type]
        "environments": Setting(environments, {}, described["environments"]),
        "evaluation": Setting(environments, {}, described["evaluation"]),
        "training": Setting(training, training(), described["training"]),
    }
    further = {path: one for path, one in _settings().items() if not path.startswith(_TRAINING)}
    return _extended(RunConfig, run_config_type, own | further, {"__post_init__": _check})


def _settings() -> Mapping[str, Setting]:
    paths = [*RunConfig.__struct_fields__, *(f"{_TRAINING}{name}" for name in TrainingConfig.__struct_fields__)]
    with_added("settings", dict.fromkeys(paths))  # none of them is an extension's
    return added("settings")


def _check(config: RunConfig) -> None:
    RunConfig.__post_init__(config)
    for _ in call_each("check", config):
        pass


def _restored(make: Callable[[], type[Any]], values: dict[str, Any]) -> Any:
    """Return a configuration that another process of this machine has sent."""
    return make()(**values)


def _extended(
    base: type[Any], make: Callable[[], type[Any]], added: Mapping[str, Setting], namespace: dict[str, Any]
) -> type[Any]:
    """Return a subclass of a struct with further fields, which keeps its name, as errors and schemas show it.

    `make` returns it, in any process: work that is handed to a process of its own (`anyio.to_process`) takes the
    configuration along.
    """

    def reduce(self: msgspec.Struct) -> tuple[Any, ...]:
        return _restored, (make, msgspec.structs.asdict(self))

    named = {"__doc__": base.__doc__, "__qualname__": base.__qualname__}
    described = {"DESCRIPTIONS": {name: one.description for name, one in added.items()}}
    return msgspec.defstruct(
        base.__name__,
        [(name, one.type, one.default) for name, one in added.items()],
        bases=(base,),
        module=base.__module__,
        namespace={**named, **described, "__reduce__": reduce, **namespace},
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )
