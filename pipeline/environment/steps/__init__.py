"""Step-based environments: ours as `reset` and `step`, and others as sources of rollouts."""

from lachesis.pipeline.environment.steps.atropos_step_env import AtroposStepEnv
from lachesis.pipeline.environment.steps.source import GemSource, GymnasiumSource, StepSource
from lachesis.pipeline.environment.steps.step_env import StepEnv

__all__ = ["AtroposStepEnv", "GemSource", "GymnasiumSource", "StepEnv", "StepSource"]
