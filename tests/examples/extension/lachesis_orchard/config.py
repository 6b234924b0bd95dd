"""The settings of [orchard], and what goes with them."""

from typing import Annotated

from msgspec import Meta, Struct

from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.errors import ConfigError


class OrchardConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the apples go."""

    basket: bool = True
    """Whether a service counts the groups that have been stored. Default true."""
    size: Annotated[int, Meta(ge=1)] = 1000
    """Groups that a basket holds; further ones are not counted. Default 1000."""


def settings_of(config: RunConfig) -> OrchardConfig:
    """Return [orchard]."""
    return config.at("orchard", OrchardConfig())


def check(config: RunConfig) -> None:
    """Raise `ConfigError` for a basket that is smaller than a batch."""
    if settings_of(config).size < config.batching.batch_size:
        raise ConfigError(f"orchard.size is {settings_of(config).size}: a batch would not fit into the basket")
