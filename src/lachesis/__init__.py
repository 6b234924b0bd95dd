"""Lachesis: an event-driven rollout pipeline for reinforcement learning of language models."""

__version__ = "0.1.0"
