"""The HTTP gateway: environments that speak the Atropos trajectory API publish rollouts into the run."""
