"""Held-out evaluation: tasks kept out of training, success rates on them, and whether they drop."""
