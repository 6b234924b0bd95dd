"""The stage runtime: services, stateless and stateful consumers, retries, dead letters, marks of streams."""
