"""Where figures, samples and alerts of a run go besides its own files: wandb, TensorBoard, MLflow."""
