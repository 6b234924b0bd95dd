"""Health checks: find what is wrong with a run by its event streams, and act on it."""
