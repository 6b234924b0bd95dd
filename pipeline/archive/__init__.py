"""The archive: rollouts and what was derived of them as files, and back into a run."""
