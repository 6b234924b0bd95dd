"""Estimators: each turns the rewards of one complete group into advantages; one file each.

`known_estimators` is the one list of them; each loads only when a configuration names it.
"""
