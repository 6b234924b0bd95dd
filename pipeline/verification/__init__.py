"""Numerical verification of what judges and trains: raters, advantages, the loss."""
