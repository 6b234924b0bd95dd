"""The engines of the pipeline's own: one folder each, one entry in `inference/config.py`."""
