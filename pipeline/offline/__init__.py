"""Work on recorded rollouts: replay, comparison, offline training, reproduction, export and import."""
