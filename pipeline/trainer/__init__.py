"""The learning side: the policy model, batches, loss, optimizer steps and checkpoints.

Needs the `train` extra (torch).
"""
