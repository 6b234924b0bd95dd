"""Health checks: what is wrong with a run, seen in its event streams, and what is done about it."""
