"""Signs in at Tinker for `lachesis doctor`: the key is taken, and the model is one that it trains."""

import os

import anyio

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.extensions.tinker.config import settings_of
from lachesis.pipeline.extensions.tinker.key import key_problem
from lachesis.pipeline.extensions.tinker.names import base_model_of
from lachesis.schemas.errors import ConfigError

__all__ = ["sign_in"]

_TIMEOUT_S = 20.0


def sign_in(config: RunConfig) -> str:
    """Return what was found. Raises `ConfigError`, `AccessError` or `InfrastructureError`."""
    if key_problem(os.environ) is not None:
        return "not tried: there is no key"  # which has a finding of its own
    from lachesis.pipeline.extensions.tinker.client import trainable_models

    settings, base = settings_of(config), base_model_of(config)
    models = anyio.run(trainable_models, settings, _TIMEOUT_S)
    if base not in models:
        raise ConfigError(f"Tinker trains no model {base!r}{nearest(base, models)}")
    return f"signed in; {base} is one of {len(models)} models that it trains"
