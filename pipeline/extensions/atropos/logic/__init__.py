"""Conversions of what Atropos sends and writes to groups of rollouts. Pure."""
