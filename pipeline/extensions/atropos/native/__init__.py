"""Environments of Atropos without HTTP: a `BaseEnv` class in a process of its own, driven by the run."""
