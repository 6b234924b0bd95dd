"""The teacher: a second model's logprobs for the tokens that the policy sampled."""
