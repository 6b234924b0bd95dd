"""Tasks: an environment's items, the arguments that fit them, and reading data sets."""
