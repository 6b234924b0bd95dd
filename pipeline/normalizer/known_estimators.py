"""Lists the built-in estimators by the names that a configuration gives, without loading any of them."""

from lachesis.pipeline.extension import with_added

__all__ = ["ESTIMATORS", "estimator_names"]

_HERE = "lachesis.pipeline.normalizer.estimators"

ESTIMATORS = {
    "centred": f"{_HERE}.centred:Centred",
    "grpo": f"{_HERE}.grpo:Grpo",
    "dr_grpo": f"{_HERE}.dr_grpo:DrGrpo",
    "rloo": f"{_HERE}.rloo:Rloo",
    "maxrl": f"{_HERE}.maxrl:MaxRl",
    "opo": f"{_HERE}.opo:Opo",
    "reinforce++-baseline": f"{_HERE}.reinforce_plus_plus:ReinforcePlusPlus",
    "gdpo": f"{_HERE}.gdpo:Gdpo",
    "pass@k": f"{_HERE}.pass_at_k:PassAtK",
}
"""The built-in ones by name: `module:Class` of each."""


def estimator_names() -> tuple[str, ...]:
    """Return the names of all estimators, those of extensions too."""
    return tuple(with_added("estimators", ESTIMATORS))
