"""Configuration: one TOML file a run, every setting typed, documented and traceable to where it came from."""
