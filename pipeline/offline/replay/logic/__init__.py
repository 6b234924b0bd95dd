"""Pure logic of replays: selection, the fold from scores to rewards, and comparison."""
