"""The batcher: joins annotations with rollouts, selects groups, and writes batches to the ledger."""
