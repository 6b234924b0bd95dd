"""`lachesis dev`: the run's own stages on a bus in memory, in one process, for breakpoints."""
