"""Step-based environments: ours as `reset` and `step`, and others as sources of rollouts."""

from lachesis.pipeline.environments.steps.atropos_step_env import AtroposStepEnv
from lachesis.pipeline.environments.steps.source import GemSource, GymnasiumSource, StepSource
from lachesis.pipeline.environments.steps.step_env import StepEnv

__all__ = ["AtroposStepEnv", "GemSource", "GymnasiumSource", "StepEnv", "StepSource"]
