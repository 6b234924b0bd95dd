"""The policy model: tokenizer, weights on disk, and logprobs. Needs the `train` extra (torch)."""
