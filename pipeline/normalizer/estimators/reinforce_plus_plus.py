"""reinforce++-baseline: reward minus the group's mean, whitened over the batch (arXiv:2501.03262)."""

from lachesis.pipeline.normalizer.estimators.centred import Centred

__all__ = ["ReinforcePlusPlus"]


class ReinforcePlusPlus(Centred):
    """r - mean; the batcher whitens it."""

    name = "reinforce++-baseline"
    whitens = True
