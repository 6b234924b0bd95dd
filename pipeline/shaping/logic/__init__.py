"""Pure logic of reward shaping: what a sample would get, and how much of it is in force."""
