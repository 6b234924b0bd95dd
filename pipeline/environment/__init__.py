"""Environments: the SDK, collection of rollout groups, evaluation, and the adapter for reasoning-gym."""

from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.inference import Inference
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.rollout import GroupDraft, SampleFailure, build_group, collect_group
from lachesis.pipeline.environment.session import Reply, SampleEnded, Session
from lachesis.pipeline.environment.tools import tool
from lachesis.pipeline.evaluator.evaluate import EvalResult, evaluate
from lachesis.pipeline.tasks.task import Task

__all__ = [
    "CollectConfig",
    "Environment",
    "EvalResult",
    "GroupDraft",
    "Inference",
    "Reply",
    "SampleEnded",
    "SampleFailure",
    "Session",
    "Task",
    "build_group",
    "collect_group",
    "evaluate",
    "load_environment",
    "tool",
]
