"""One thin module per process, the supervisor that starts them, and the command line."""
