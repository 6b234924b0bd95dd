"""Derives how evaluations and tests collect answers of a configured environment."""

from lachesis.pipeline.environment.config import CollectConfig, EnvironmentConfig
from lachesis.pipeline.environment.inference import Inference

__all__ = ["collect_config", "max_context_of"]


def collect_config(settings: EnvironmentConfig, *, max_context: int | None = None) -> CollectConfig:
    """Return the settings' configuration. `max_context`: tokens of the model's context; None: not known."""
    return CollectConfig(
        request_timeout_s=settings.timeout_s,
        chat_template_kwargs=settings.chat_template_kwargs,
        max_context=max_context,
    )


async def max_context_of(inference: Inference) -> int | None:
    """Return how many tokens the model's context has; None if the server does not say."""
    ask = getattr(inference, "max_model_len", None)
    found: int | None = None if ask is None else await ask()
    return found
