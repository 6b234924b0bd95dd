"""Estimators: each turns the rewards of one complete group into advantages; one file each."""
