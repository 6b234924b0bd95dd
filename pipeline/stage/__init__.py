"""The stage runtime: stateless stages (competing replicas) and stateful ones (fenced commits)."""
