"""Pure logic of the curriculum: strategies, the sampler that environments draw with, mixing of environments."""
