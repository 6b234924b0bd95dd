"""Weights from the trainer to inference servers, as files or through the run's own NATS server."""
