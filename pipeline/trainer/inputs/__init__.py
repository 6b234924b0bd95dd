"""Inputs of a model, or of its loss, besides text tokens: `training.inputs`."""
