"""Lachesis: an event-driven rollout pipeline for reinforcement learning of language models."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lachesis.pipeline.environments.environment import Environment
    from lachesis.pipeline.environments.session import Reply, Session
    from lachesis.pipeline.environments.steps.atropos_step_env import AtroposStepEnv
    from lachesis.pipeline.environments.steps.step_env import StepEnv
    from lachesis.pipeline.environments.steps.text import SampledText
    from lachesis.pipeline.environments.tools import tool
    from lachesis.pipeline.gateway.curriculum_mixin import CurriculumMixin
    from lachesis.pipeline.inference.client import GeneratedSample, InferenceClient
    from lachesis.pipeline.inference.protocol import WeightVersionSpan
    from lachesis.pipeline.library.ensemble import RewardEnsemble, krippendorff_alpha
    from lachesis.pipeline.library.health import HealthChecks
    from lachesis.pipeline.library.performance import PerformanceTracker
    from lachesis.pipeline.library.scheduler import CurriculumScheduler
    from lachesis.pipeline.rewards.estimators.estimator import RewardGroup
    from lachesis.pipeline.rewards.estimators.own import estimator
    from lachesis.pipeline.rewards.welford import RewardNormalizer, WelfordAccumulator
    from lachesis.pipeline.scoring.rater import Sample, rater
    from lachesis.pipeline.tasks.task import Task
    from lachesis.pipeline.training.batches import batches
    from lachesis.pipeline.training.inputs.model_input import ModelInput
    from lachesis.schemas.errors import RaterUnavailable, ToolError
    from lachesis.schemas.rollout import Message
    from lachesis.services.notebook import open_run

__version__ = "0.1.0"

__all__ = [
    "AtroposStepEnv",
    "CurriculumMixin",
    "CurriculumScheduler",
    "Environment",
    "GeneratedSample",
    "HealthChecks",
    "InferenceClient",
    "Message",
    "ModelInput",
    "PerformanceTracker",
    "RaterUnavailable",
    "Reply",
    "RewardEnsemble",
    "RewardGroup",
    "RewardNormalizer",
    "Sample",
    "SampledText",
    "Session",
    "StepEnv",
    "Task",
    "ToolError",
    "WeightVersionSpan",
    "WelfordAccumulator",
    "batches",
    "estimator",
    "krippendorff_alpha",
    "open_run",
    "rater",
    "tool",
]

_HOMES = {
    "WeightVersionSpan": "lachesis.pipeline.inference.protocol",
    "InferenceClient": "lachesis.pipeline.inference.client",
    "GeneratedSample": "lachesis.pipeline.inference.client",
    "WelfordAccumulator": "lachesis.pipeline.rewards.welford",
    "krippendorff_alpha": "lachesis.pipeline.library.ensemble",
    "RewardEnsemble": "lachesis.pipeline.library.ensemble",
    "PerformanceTracker": "lachesis.pipeline.library.performance",
    "HealthChecks": "lachesis.pipeline.library.health",
    "CurriculumScheduler": "lachesis.pipeline.library.scheduler",
    "AtroposStepEnv": "lachesis.pipeline.environments.steps.atropos_step_env",
    "CurriculumMixin": "lachesis.pipeline.gateway.curriculum_mixin",
    "Environment": "lachesis.pipeline.environments.environment",
    "Message": "lachesis.schemas.rollout",
    "ModelInput": "lachesis.pipeline.training.inputs.model_input",
    "RaterUnavailable": "lachesis.schemas.errors",
    "Reply": "lachesis.pipeline.environments.session",
    "RewardGroup": "lachesis.pipeline.rewards.estimators.estimator",
    "RewardNormalizer": "lachesis.pipeline.rewards.welford",
    "Session": "lachesis.pipeline.environments.session",
    "SampledText": "lachesis.pipeline.environments.steps.text",
    "StepEnv": "lachesis.pipeline.environments.steps.step_env",
    "Task": "lachesis.pipeline.tasks.task",
    "Sample": "lachesis.pipeline.scoring.rater",
    "ToolError": "lachesis.schemas.errors",
    "batches": "lachesis.pipeline.training.batches",
    "estimator": "lachesis.pipeline.rewards.estimators.own",
    "open_run": "lachesis.services.notebook",
    "rater": "lachesis.pipeline.scoring.rater",
    "tool": "lachesis.pipeline.environments.tools",
}
"""Where the public names live. They are imported on first use, so that a service pays only for what it needs."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "importlib"})
