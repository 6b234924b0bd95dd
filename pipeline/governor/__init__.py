"""The governor: grants leases, so that no more is generated than can be used."""
