"""What the gateway decides: which group a trajectory becomes, what waits in a buffer, who is registered. Pure."""
