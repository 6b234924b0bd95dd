"""Lists the built-in strategies by the names that a configuration gives, without loading any of them."""

from lachesis.pipeline.extension import with_added

__all__ = ["STRATEGIES", "name_of", "strategy_names"]

_HERE = "lachesis.pipeline.curriculum.logic"

STRATEGIES = {
    "uniform": f"{_HERE}.strategy:Strategy",
    "epoch": f"{_HERE}.schedules:Epoch",
    "easy_first": f"{_HERE}.schedules:EasyFirst",
    "competence": f"{_HERE}.schedules:Competence",
    "pools": f"{_HERE}.schedules:Pools",
    "sec": f"{_HERE}.sec:SelfEvolving",
    "irt": f"{_HERE}.irt:OnlineIRT",
    "gain_per_token": f"{_HERE}.gain_per_token:GainPerToken",
}
"""The built-in ones by name: `module:Class` of each."""


def strategy_names() -> tuple[str, ...]:
    """Return the names of all strategies, those of extensions too."""
    return tuple(with_added("strategies", STRATEGIES))


def name_of(class_name: str) -> str:
    """Return what the configuration calls the strategy of this class: a user's own keeps its own."""
    return next((name for name, place in STRATEGIES.items() if place.endswith(f":{class_name}")), class_name)
