"""Looks through the prompts of a run's environments as the policy's chat template renders them."""

from functools import cache
from typing import TYPE_CHECKING, Any

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environments.environment import Environment
from lachesis.pipeline.environments.load import load_environment
from lachesis.schemas.errors import ConfigError

if TYPE_CHECKING:
    from lachesis.pipeline.environments.prompts import PromptReport

__all__ = ["PolicyPrompts", "context_of_model"]

_VLLM_CONTEXT = "--max-model-len"


class PolicyPrompts:
    """The tokenizer and the context of a run's policy, loaded when the first environment is looked at."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._load = cache(self._loaded)

    @property
    def known(self) -> bool:
        """Whether the configuration names a tokenizer."""
        return self._config.tokenizer_of("policy") is not None

    async def check(self, name: str, env: Environment | None = None) -> "PromptReport":
        """Return what is wrong with an environment's prompts.

        Raises what loading it, or the tokenizer, raises.
        """
        from lachesis.pipeline.environments.prompts import check_prompts

        settings = self._config.environments[name]
        tokenizer, longest = self._load()
        return await check_prompts(
            env or load_environment(settings.kind, settings.params),
            tokenizer,
            parameters=settings.chat_template_kwargs,
            max_context=longest,
            max_new_tokens=settings.max_new_tokens,
        )

    async def describe(self, name: str, env: Environment) -> str:
        """Return what was seen of the prompts. Raises `ConfigError` where something is wrong with them."""
        found = await self.check(name, env)
        if found.problems:
            raise ConfigError("; ".join(problem.text for problem in found.problems))
        return found.text

    def _loaded(self) -> tuple[Any, int | None]:
        from lachesis.pipeline.model.pretrained_tokenizer import load_tokenizer

        name, template = self._config.tokenizer_of("policy"), self._config.chat_template_of("policy")
        return load_tokenizer(str(name), template), max_context(self._config)


def max_context(config: RunConfig) -> int | None:
    """Return the tokens of the policy's context, None where only its server knows."""
    settings = config.role("policy")
    if settings.url is not None or config.is_at_tinker("inference", "policy"):
        return None
    if settings.kind == "reference" and settings.engine.max_model_len is not None:
        return settings.engine.max_model_len
    if _VLLM_CONTEXT in settings.args[:-1]:
        given = settings.args[settings.args.index(_VLLM_CONTEXT) + 1]
        return int(given) if given.isdecimal() else None
    return context_of_model(settings.model or config.model)


def context_of_model(name: str | None) -> int | None:
    """Return what a model's own configuration says of its context, None where it says nothing."""
    from transformers import AutoConfig

    if name is None:
        return None
    try:
        found = AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
    except (OSError, ValueError, KeyError):
        return None  # what is wrong with a model has findings of its own
    context = getattr(found, "max_position_embeddings", None)
    return context if isinstance(context, int) else None
