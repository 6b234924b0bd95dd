"""What becomes of a reward: normalization, shaping, advantages, and what keeps a group from being trained on."""
