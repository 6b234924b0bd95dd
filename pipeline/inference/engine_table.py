"""The table of inference engines: what the rest has to know of each, and how one is served."""

from collections.abc import Callable
from typing import Final

from lachesis.pipeline.extension import EngineSpec, with_added

__all__ = ["DEFAULT_ENGINE", "ENGINES", "engines", "engines_that"]

_HERE = "lachesis.pipeline.inference.engines"

ENGINES = {
    "reference": EngineSpec(
        serve=f"{_HERE}.reference.serve:serve_reference",
        says="lachesis",
        extra="train",
        loads_here=True,
        is_light=True,
        records_kept_tokens=True,
        shares_memory=True,
    ),
    "vllm": EngineSpec(
        serve=f"{_HERE}.vllm.serve:serve_vllm",
        says="vllm",
        extra="vllm",
        constrains_answers=True,
        shares_memory=True,
        context_option="--max-model-len",
        min_head_size=32,
        folder_entries=("vllm",),
        check_interpreter=f"{_HERE}.vllm.interpreter:check_vllm",
    ),
}
"""The engines of the pipeline's own by name, each with what the rest has to know of it."""
DEFAULT_ENGINE: Final = "reference"


def engines() -> dict[str, EngineSpec]:
    """Return the inference engines by name, those of extensions too."""
    return with_added("engines", ENGINES)


def engines_that(can: Callable[[EngineSpec], bool], role: str = "policy") -> str:
    """Return the settings, as a text for people, that choose an engine which can do something."""
    return " or ".join(f'inference.{role}.kind = "{name}"' for name, spec in engines().items() if can(spec))
