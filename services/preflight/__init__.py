"""Checks before a run starts, and by `lachesis doctor`: each yields findings that say how to fix what is wrong."""
