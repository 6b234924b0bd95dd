"""Inputs of a model, or of its loss, other than text tokens: `training.inputs`."""
