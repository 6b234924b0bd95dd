"""The scorer: raters, ensembles of them, and how far they agree."""
