"""Switching a live run to another revision of its raters, normalization and advantages."""
