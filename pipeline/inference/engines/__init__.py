"""The inference engines of the pipeline's own: one folder each, one entry in `ENGINES`."""

from lachesis.pipeline.extension import EngineSpec, with_added

__all__ = ["ENGINES", "engines"]

_HERE = "lachesis.pipeline.inference.engines"

ENGINES = {
    "reference": EngineSpec(
        serve=f"{_HERE}.reference.serve:serve_reference",
        says="lachesis",
        extra="train",
        loads_here=True,
        is_light=True,
        records_kept_tokens=True,
    ),
    "vllm": EngineSpec(
        serve=f"{_HERE}.vllm.serve:serve_vllm",
        says="vllm",
        extra="vllm",
        constrains_answers=True,
        check_interpreter=f"{_HERE}.vllm.interpreter:check_vllm",
    ),
}
"""The engines of the pipeline's own by name, each with what the rest has to know of it."""


def engines() -> dict[str, EngineSpec]:
    """Return the inference engines by name, those of extensions too."""
    return with_added("engines", ENGINES)
