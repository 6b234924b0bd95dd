"""The gateway's decisions: groups of trajectories, buffers, and registrations. Pure."""
