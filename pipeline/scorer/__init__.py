"""Scoring: raters, ensembles of them, and how far they agree."""
