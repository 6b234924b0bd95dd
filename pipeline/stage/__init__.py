"""The stage runtime: the one way to write a consumer, stateless (competing replicas) or stateful (fenced commits)."""
