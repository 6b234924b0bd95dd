"""Environments of this project and of Atropos as `reset` and `step`, for a loop of somebody's own."""
