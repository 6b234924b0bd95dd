"""Reproduction: rebuilds a run's batches and weights from its streams and compares them."""
