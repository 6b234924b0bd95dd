"""Training at Tinker by its own SDK, and the policy served at /v1. No torch."""

from lachesis.pipeline.extension import Extension, Setting, TrainerSpec
from lachesis.pipeline.extensions.tinker.config import TinkerConfig

__all__ = ["EXTENSION"]

_HERE = "lachesis.pipeline.extensions.tinker"

EXTENSION = Extension(
    name="tinker",
    about="training at Tinker (the extra `tinker`), as training.tinker says; its key is in the variable TINKER_API_KEY",
    settings={"training.tinker": Setting(TinkerConfig, TinkerConfig(), "Training at Tinker.")},
    check=f"{_HERE}.config:check_tinker",
    trainers={
        "tinker": TrainerSpec(
            open=f"{_HERE}.backend:open_tinker",
            serving=f"{_HERE}.serving:run_tinker_inference",
            extra="tinker",
            model=f"{_HERE}.names:named_model",
            port="training.tinker.port",
            tries=f"{_HERE}.account:sign_in",
        ),
    },
    doctor=f"{_HERE}.key:check_key",
)
