"""Numerical checks of raters, advantages and the loss."""
