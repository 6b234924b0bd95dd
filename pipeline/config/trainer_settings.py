"""Makes from a run's configuration what its trainer needs.

Services, offline trainers and extensions share it.
"""

from collections.abc import Iterator

import msgspec

from lachesis.pipeline.config.evaluation_sources import evaluable_steps, evaluated_environments, evaluation_names
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.servers import role_access
from lachesis.pipeline.config.toml import to_toml
from lachesis.pipeline.extension import load_place, wanted_trackers
from lachesis.pipeline.trainer.config import TORCH_BACKEND
from lachesis.pipeline.trainer.settings import OpenBackend, TrainerSettings
from lachesis.pipeline.trainer.tracker import Tracker

__all__ = ["open_trackers", "trainer_settings"]


def trainer_settings(config: RunConfig) -> TrainerSettings:
    """Return the settings of the trainer."""
    return TrainerSettings(
        run=config.run,
        revision=config.revision,
        seed=config.seed,
        folder=config.path,
        training=config.training,
        model=config.model,
        tokenizer=config.tokenizer,
        chat_template=config.chat_template,
        model_exceptions=tuple(config.model_exceptions),
        weights=config.weights,
        weights_bytes=config.streams.weights_bytes,
        policy=config.role("policy"),
        policy_access=role_access(config, "policy"),
        drain_s=config.services.drain_s,
        max_staleness=config.batching.max_staleness,
        step_of=config.batching.step_of,
        has_teacher=config.batching.teacher != "off",
        evaluated=tuple(evaluated_environments(config)),
        evaluations_of=evaluation_names(config),
        evaluable=evaluable_steps(config),
        alerts_from=config.health.webhook_from,
        open_backend=_open_backend(config),
        trackers=lambda name: open_trackers(config, name),
        run_file=lambda: to_toml(msgspec.structs.replace(config, folder=str(config.path))),
    )


def _open_backend(config: RunConfig) -> OpenBackend:
    """Return what opens the trainer's back end, and imports it only then."""
    elsewhere = config.trains_elsewhere("trainer", "")
    place, more = (TORCH_BACKEND, ()) if elsewhere is None else (elsewhere.open, (config,))
    return lambda service, settings: load_place(place)(service, settings, *more)


def open_trackers(config: RunConfig, name: str | None = None, *, only: str | None = None) -> Iterator[Tracker]:
    """Yield the configured trackers, or the one that the setting `only` wants.

    `name` is the run's name in them; left out, it is the run's own. Raises `StartupError` where a package is missing.
    """
    for setting, spec in wanted_trackers(config).items():
        if only in {None, setting}:
            yield load_place(spec.open)(config, name or config.run)
