"""Pure logic of replays: the selection of rollouts, and the fold from scores to rewards."""
