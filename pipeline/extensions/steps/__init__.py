"""Step-based environments of others (gem, Gymnasium) as sources of rollouts."""

from lachesis.pipeline.extension import EnvironmentKind, Extension

__all__ = ["EXTENSION"]

_SOURCES = "lachesis.pipeline.extensions.steps.source"

EXTENSION = Extension(
    name="steps",
    about="environments with reset and step, as gem and Gymnasium have them",
    environments={
        "gem": EnvironmentKind(place=f"{_SOURCES}:GemSource"),
        "gymnasium": EnvironmentKind(place=f"{_SOURCES}:GymnasiumSource"),
        "steps": EnvironmentKind(place=f"{_SOURCES}:StepSource", param_paths={"place": "code"}),
    },
)
