"""Pure logic of the curriculum.

Strategies, the sampler that environments draw with, mixing of environments.
"""
