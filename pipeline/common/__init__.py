"""Shared by all of the pipeline: files, disk, text, numbers, backoff, code that users name."""
