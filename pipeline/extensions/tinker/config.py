"""Settings of training at Tinker, and what goes with them."""

from typing import Annotated

from msgspec import Meta, Struct

from lachesis.pipeline.common.paths import Address
from lachesis.pipeline.config.run import RunConfig, TrainingConfig
from lachesis.pipeline.inference.engine_table import DEFAULT_ENGINE
from lachesis.schemas.errors import ConfigError

__all__ = ["TinkerConfig", "check_tinker", "settings_of"]

Positive = Annotated[float, Meta(gt=0)]
PositiveInt = Annotated[int, Meta(gt=0)]


class TinkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Training at Tinker: low-rank adapters by its importance-sampling loss and Adam."""

    base_model: str | None = None
    """Name of the model at Tinker, such as "Qwen/Qwen3-8B". Default None: as `model`, which names its tokenizer."""
    rank: PositiveInt = 32
    """Rank of the adapters. Default 32."""
    learning_rate: Positive = 4e-5
    """Adam's step size. Default 4e-5."""
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay of Adam's first moment. Default 0.9."""
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    """Decay of Adam's second moment. Default 0.95."""
    grad_clip: Annotated[float, Meta(ge=0)] = 0.0
    """Largest L2 norm of the gradient. Default 0: not bounded."""
    url: Address | None = None
    """URL of a server that speaks Tinker's protocol. Default None: Tinker itself (or TINKER_BASE_URL)."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8001
    """Port at which the policy is served at /v1, unless inference.policy.port names one. Default 8001; 0: any."""
    context_length: PositiveInt = 32768
    """Longest prompt and completion together, tokens. Default 32768."""
    sampler_ttl_s: Annotated[int, Meta(ge=3600)] = 86400
    """Seconds that Tinker keeps the weights of a step for samplers. Default 86400, a day."""


def settings_of(config: RunConfig) -> TinkerConfig:
    """Return [training.tinker]."""
    return config.at("training.tinker", TinkerConfig())


def check_tinker(config: RunConfig) -> None:
    """Raise `ConfigError` for settings that do not go with training at Tinker."""
    if config.training.backend != "tinker":
        return
    default = TrainingConfig()
    for name in (
        "learner",
        "lora",
        "inputs",
        "ranks",
        "sharding",
        "device",
        "attention",
        "deterministic",
        "collectives",
    ):
        if getattr(config.training, name) != getattr(default, name):
            raise ConfigError(
                f'training.{name} is set, but training.backend is "tinker", which trains elsewhere: leave it out; '
                "training.tinker has what can be chosen"
            )
    if config.batching.teacher != "off":
        raise ConfigError(
            f'batching.teacher is "{config.batching.teacher}", but training.backend is "tinker", whose loss has no '
            'teacher: set it to "off"'
        )
    for role in ("policy", "eval"):
        settings = config.role(role)
        if settings.url is not None or settings.kind != DEFAULT_ENGINE:
            raise ConfigError(
                f'inference.{role} names another server, but training.backend is "tinker": its weights are with '
                f"Tinker alone, and the run serves them itself; leave out inference.{role}.url and kind"
            )
