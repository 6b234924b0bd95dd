"""Replay: recorded rollouts scored again under a new revision."""
