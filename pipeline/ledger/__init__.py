"""The ledger: its format, chained entries, and reading and auditing them. It decides nothing."""
