"""The wire: every message that travels between processes, its subject, and what can be wrong with it."""
