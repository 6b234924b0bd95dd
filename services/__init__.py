"""The processes of a run: the table of services, the supervisor that starts them, and the command line."""
