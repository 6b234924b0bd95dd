"""Rebuilding a run from its streams: the same batches by digest, and from a checkpoint the same weights."""
