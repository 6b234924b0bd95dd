"""Datasets of reasoning-gym as environments, and its scorers as a rater."""

from lachesis.pipeline.extension import EnvironmentKind, Extension

__all__ = ["EXTENSION"]

_HERE = "lachesis.pipeline.extensions.reasoning_gym"

EXTENSION = Extension(
    name="reasoning_gym",
    about="datasets of reasoning-gym as environments, and its scorers as a rater",
    environments={
        "reasoning_gym": EnvironmentKind(
            place=f"{_HERE}.environment:ReasoningGym", choices=("dataset", f"{_HERE}.datasets:dataset_names")
        ),
    },
    raters={"reasoning_gym": f"{_HERE}.rater:ReasoningGymRater"},
)
