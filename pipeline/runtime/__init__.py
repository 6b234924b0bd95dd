"""The stage runtime: services, stateless and stateful stages, retries, dead letters, marks."""
