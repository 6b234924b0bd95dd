"""The settings of evaluations: all that they take of a run's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lachesis.pipeline.environment.config import EnvironmentConfig
from lachesis.pipeline.evaluator.config import EvaluationConfig
from lachesis.pipeline.evaluator.schedule import EvaluableSteps
from lachesis.pipeline.inference.directory import RoleAccess
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.pipeline.tasks.held_out import HeldOutRule

__all__ = ["EvaluatedEnvSettings", "EvaluatorSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEnvSettings:
    """How one environment is evaluated. `config`: its section. `evaluate`: the schedule, and how many tasks.

    `held_out`: how its tasks are chosen; where that holds none out, all its tasks are evaluated. `run`, `seed`: the
    run's.
    """

    run: str
    config: EnvironmentConfig
    scoring: ScoringConfig
    evaluate: EvaluationConfig
    held_out: HeldOutRule
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorSettings:
    """`environments`: those that are evaluated. `access`: how their inference server is reached. `folder`: the run's.

    `last_step`: of the run, None if it goes on. `ends`: whether the evaluator ends after that step, since no other
    policy comes. `evaluable`: the steps whose policies can be loaded.
    """

    environments: Mapping[str, EvaluatedEnvSettings]
    evaluate: EvaluationConfig
    access: RoleAccess
    folder: Path
    trainer: str
    last_step: int | None
    ends: bool
    evaluable: EvaluableSteps
