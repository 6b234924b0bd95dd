"""Replay: history scored again under a new revision, and revisions compared."""
