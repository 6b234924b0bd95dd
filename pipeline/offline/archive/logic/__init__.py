"""Rows of files and rollout groups, each made of the other. Pure."""
