"""Step-based environments: those of gem and Gymnasium as sources of rollouts."""

from lachesis.pipeline.environments.steps.source import GemSource, GymnasiumSource, StepSource

__all__ = ["GemSource", "GymnasiumSource", "StepSource"]
