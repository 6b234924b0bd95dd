"""Checks before a run starts, and by `lachesis doctor`.

Each yields findings that say how to fix what is wrong.
"""
