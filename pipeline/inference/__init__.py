"""Inference servers of a run: their client, their routes over any engine, and the engines."""
