"""The normalizer: rewards, shaping, advantages, and the faults that exclude a group from training."""
