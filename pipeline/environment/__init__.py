"""Environments: the SDK, collection of groups, and adapters for other projects' environments."""
