"""The reference server: an engine over transformers, in the service's own process."""
