"""dr_grpo: reward less the group's mean, for a loss with constant-length aggregation (arXiv:2503.20783)."""

from lachesis.pipeline.rewards.estimators.centred import Centred

__all__ = ["DrGrpo"]


class DrGrpo(Centred):
    """r - mean; what makes it Dr. GRPO is the loss."""

    name = "dr_grpo"
