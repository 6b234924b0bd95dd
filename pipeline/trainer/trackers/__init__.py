"""Sends figures, samples and alerts of a run to wandb, TensorBoard and MLflow."""
