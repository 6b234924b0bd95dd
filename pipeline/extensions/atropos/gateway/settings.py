"""Holds all that the gateway's stage takes of a run's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lachesis.pipeline.common.trainability import TrainerReads
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.config.servers import role_access
from lachesis.pipeline.extensions.atropos.gateway.config import GatewayConfig, settings_of
from lachesis.pipeline.inference.directory import RoleAccess

__all__ = ["GatewaySettings", "gateway_settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings of the gateway of one run.

    `environments`: all of the run. `trainer`, `steps` and `checkpoint_every` are those of [training]. `reads` and
    `temperature`: of the run's own trainer; None where another trains. `teacher_coef`: what it weighs the logprobs of
    an environment's own teacher with; None likewise. `tracked`: the project under which trackers file the run.
    """

    run: str
    folder: Path
    http: GatewayConfig
    environments: Mapping[str, EnvironmentConfig]
    policy: RoleAccess
    trains_over_http: bool
    batch_size: int
    mix: Mapping[str, float]
    strategy: str
    trainer: str
    steps: int | None
    checkpoint_every: int
    reads: TrainerReads | None
    temperature: float | None
    teacher_coef: float | None
    tracked: str
    drain_s: float

    @property
    def foreign(self) -> dict[str, EnvironmentConfig]:
        """The environments that the gateway publishes for."""
        return {name: env for name, env in self.environments.items() if env.is_foreign}


def gateway_settings(config: RunConfig) -> GatewaySettings:
    """Return what the gateway takes of a run's configuration."""
    training, project = config.training, config.at("training.wandb.project", None)
    return GatewaySettings(
        run=config.run,
        folder=config.path,
        http=settings_of(config),
        environments=config.environments,
        policy=role_access(config, "policy"),
        trains_over_http=config.mode == "observe",
        batch_size=config.batching.batch_size,
        mix=config.batching.mix,
        strategy=config.curriculum.strategy,
        trainer=training.name,
        steps=training.steps,
        checkpoint_every=training.checkpoint_every,
        reads=config.trainer_reads,
        temperature=config.trained_temperature,
        teacher_coef=training.learner.loss.teacher_coef if config.mode == "train" else None,
        tracked=project or config.run,
        drain_s=config.services.drain_s,
    )
