"""Telemetry: always-on histograms; what every percentile this project prints comes from."""
