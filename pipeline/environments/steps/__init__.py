"""Step-based environments: ours as `reset` and `step`, and others as sources of rollouts."""

from lachesis.pipeline.environments.steps.source import GemSource, GymnasiumSource, StepSource
from lachesis.pipeline.environments.steps.step_env import StepEnv

__all__ = ["GemSource", "GymnasiumSource", "StepEnv", "StepSource"]
