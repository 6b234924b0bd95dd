"""The names that a run has for a model at Tinker."""

from __future__ import annotations

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.extensions.tinker.config import settings_of
from lachesis.schemas.errors import ConfigError

__all__ = ["base_model_of", "named_model", "tokenizer_of"]


def base_model_of(config: RunConfig) -> str:
    """Return the model's name at Tinker. Raises `ConfigError` where none is set."""
    name = settings_of(config).base_model or config.model
    if name is None:
        raise ConfigError("training.tinker.base_model: not set, and neither is model; name a model of Tinker's")
    return name


def tokenizer_of(config: RunConfig) -> str:
    """Return the folder or id that its tokenizer is loaded from. Raises `ConfigError` as `base_model_of`."""
    return config.tokenizer_name or base_model_of(config)


def named_model(config: RunConfig) -> tuple[str, str | None]:
    """Return the setting that names the model at Tinker, and its name; None: none is named."""
    return "training.tinker.base_model", settings_of(config).base_model
