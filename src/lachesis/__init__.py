"""Lachesis: an event-driven rollout pipeline for reinforcement learning of language models."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lachesis.pipeline.environment.environment import Environment
    from lachesis.pipeline.environment.session import Reply, SampleEnded, Session
    from lachesis.pipeline.environment.tools import tool
    from lachesis.pipeline.errors import RaterUnavailable, ToolError
    from lachesis.pipeline.extensions.atropos.gateway.curriculum_mixin import CurriculumMixin
    from lachesis.pipeline.extensions.atropos.step_bridge.atropos_step_env import AtroposStepEnv
    from lachesis.pipeline.extensions.atropos.step_bridge.step_env import StepEnv
    from lachesis.pipeline.extensions.atropos.step_bridge.text import SampledText
    from lachesis.pipeline.inference.answered_sample import GeneratedSample
    from lachesis.pipeline.inference.client import InferenceClient
    from lachesis.pipeline.inference.protocol import WeightVersionSpan
    from lachesis.pipeline.library.ensemble import RewardEnsemble, krippendorff_alpha
    from lachesis.pipeline.library.health import HealthChecks
    from lachesis.pipeline.library.performance import PerformanceTracker
    from lachesis.pipeline.library.reward_normalizer import RewardNormalizer, WelfordAccumulator
    from lachesis.pipeline.library.scheduler import CurriculumScheduler
    from lachesis.pipeline.normalizer.estimators.estimator import RewardGroup
    from lachesis.pipeline.normalizer.estimators.user_estimator import estimator
    from lachesis.pipeline.scorer.rater import Rating, Sample, rater
    from lachesis.pipeline.tasks.task import Task
    from lachesis.pipeline.trainer.batch_reader import batches
    from lachesis.pipeline.trainer.inputs.model_input import ModelInput
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
    "Rating",
    "Reply",
    "RewardEnsemble",
    "RewardGroup",
    "RewardNormalizer",
    "Sample",
    "SampleEnded",
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
    "GeneratedSample": "lachesis.pipeline.inference.answered_sample",
    "WelfordAccumulator": "lachesis.pipeline.library.reward_normalizer",
    "krippendorff_alpha": "lachesis.pipeline.library.ensemble",
    "RewardEnsemble": "lachesis.pipeline.library.ensemble",
    "PerformanceTracker": "lachesis.pipeline.library.performance",
    "HealthChecks": "lachesis.pipeline.library.health",
    "CurriculumScheduler": "lachesis.pipeline.library.scheduler",
    "AtroposStepEnv": "lachesis.pipeline.extensions.atropos.step_bridge.atropos_step_env",
    "CurriculumMixin": "lachesis.pipeline.extensions.atropos.gateway.curriculum_mixin",
    "Environment": "lachesis.pipeline.environment.environment",
    "Message": "lachesis.schemas.rollout",
    "ModelInput": "lachesis.pipeline.trainer.inputs.model_input",
    "RaterUnavailable": "lachesis.pipeline.errors",
    "Rating": "lachesis.pipeline.scorer.rater",
    "Reply": "lachesis.pipeline.environment.session",
    "RewardGroup": "lachesis.pipeline.normalizer.estimators.estimator",
    "RewardNormalizer": "lachesis.pipeline.library.reward_normalizer",
    "Session": "lachesis.pipeline.environment.session",
    "SampledText": "lachesis.pipeline.extensions.atropos.step_bridge.text",
    "StepEnv": "lachesis.pipeline.extensions.atropos.step_bridge.step_env",
    "Task": "lachesis.pipeline.tasks.task",
    "SampleEnded": "lachesis.pipeline.environment.session",
    "Sample": "lachesis.pipeline.scorer.rater",
    "ToolError": "lachesis.pipeline.errors",
    "batches": "lachesis.pipeline.trainer.batch_reader",
    "estimator": "lachesis.pipeline.normalizer.estimators.user_estimator",
    "open_run": "lachesis.services.notebook",
    "rater": "lachesis.pipeline.scorer.rater",
    "tool": "lachesis.pipeline.environment.tools",
}
"""Where the public names live. They are imported on first use, so that a service pays only for what it needs."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "importlib"})
