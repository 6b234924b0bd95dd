"""The rules of held-out evaluation, pure."""
