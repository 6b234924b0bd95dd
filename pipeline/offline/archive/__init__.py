"""Export and import: rollouts and everything derived from them as files, and back into a run."""
