"""Environments: the SDK, collection of rollout groups, evaluation, and the adapter for reasoning-gym."""

from lachesis.pipeline.environments.config import CollectConfig
from lachesis.pipeline.environments.environment import Environment
from lachesis.pipeline.environments.evaluate import EvalResult, evaluate
from lachesis.pipeline.environments.inference import Inference
from lachesis.pipeline.environments.load import load_environment
from lachesis.pipeline.environments.rollout import GroupDraft, SampleFailure, build_group, collect_group
from lachesis.pipeline.environments.session import Reply, SampleEnded, Session
from lachesis.pipeline.environments.tools import tool
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
