"""Calls of conversations in the log: storing them, and going on from them."""
