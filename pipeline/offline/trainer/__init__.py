"""The offline trainer: the ledger of a second model trained on recorded rollouts."""
