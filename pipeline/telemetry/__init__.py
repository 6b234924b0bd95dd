"""Telemetry of services: heartbeats and their figures, histograms, traces, and their export over OTLP."""
