"""Comparison of two revisions of the same rollouts. Pure."""
