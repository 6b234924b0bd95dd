"""Held-out evaluation: which tasks no run trains on, how well a policy does on them, and whether that falls."""
