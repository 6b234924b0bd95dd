"""The ledger: chained entries, reading and auditing them, and forming the batches they record."""
