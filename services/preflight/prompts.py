"""Looks through the prompts of a run's environments as the policy's chat template renders them."""

from functools import cache
from typing import TYPE_CHECKING, Any

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.load import load_environment
from lachesis.schemas.errors import ConfigError

if TYPE_CHECKING:
    from lachesis.pipeline.environment.prompts import PromptReport

__all__ = ["PolicyPrompts"]


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
        from lachesis.pipeline.environment.prompts import check_prompts

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
        from lachesis.services.stage_settings import policy_context

        name, template = self._config.tokenizer_of("policy"), self._config.chat_template_of("policy")
        return load_tokenizer(str(name), template), policy_context(self._config)
