"""The engines that serve samples: one folder each, one entry each in `engine_table.py`."""
