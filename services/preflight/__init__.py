"""Checks before a run starts, and by `lachesis doctor`: each yields findings that say how to mend what is wrong."""
