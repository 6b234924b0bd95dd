"""From annotated rollouts to batches: the join, the selection, and the ledger that records both."""
