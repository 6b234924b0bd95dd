"""The processes of a run: the service table, the supervisor that starts them, and the command line."""
