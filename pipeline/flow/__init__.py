"""Backpressure: the governor's leases, which bound what is generated, stored and not yet trained."""
