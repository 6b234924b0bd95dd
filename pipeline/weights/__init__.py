"""Weights on the move: from the trainer to inference servers, as files or through the run's own NATS server."""
