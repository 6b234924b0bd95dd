"""Finds the context length of a run's policy, by the settings of its server. No torch."""

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.model.context import VLLM_CONTEXT_OPTION, context_of_model

__all__ = ["policy_context"]


def policy_context(run: RunConfig) -> int | None:
    """Return the tokens of the policy's context, None where only its server knows."""
    settings = run.role("policy")
    if settings.engine.max_model_len is not None:
        return settings.engine.max_model_len
    if settings.url is not None or run.trains_elsewhere("inference", "policy") is not None:
        return None
    if VLLM_CONTEXT_OPTION in settings.args[:-1]:
        given = settings.args[settings.args.index(VLLM_CONTEXT_OPTION) + 1]
        return int(given) if given.isdecimal() else None
    return context_of_model(settings.model or run.model)
