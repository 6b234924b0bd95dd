"""dr_grpo: reward minus the group's mean (arXiv:2503.20783).

For a loss with constant-length aggregation.
"""

from lachesis.pipeline.normalizer.estimators.centred import Centred

__all__ = ["DrGrpo"]


class DrGrpo(Centred):
    """r - mean; what makes it Dr. GRPO is the loss."""

    name = "dr_grpo"
