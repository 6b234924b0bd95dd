"""Tasks: an environment's items, the arguments that fit them, and datasets of reasoning-gym."""
