"""Views of a run, folded from heartbeats, streams and files.

Most of it is pure.
"""
