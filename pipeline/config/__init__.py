"""Configuration: one TOML file a run, with typed, documented settings whose source is recorded."""
