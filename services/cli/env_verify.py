"""`lachesis env verify`: checks an environment, and its prompts under a model's chat template."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import anyio
import msgspec
import typer

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.verify import verify_environment
from lachesis.pipeline.errors import StartupError
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.options import Json, Options, read_params, with_options
from lachesis.services.output import print_json, print_table
from lachesis.services.preflight.prompts import PolicyPrompts

__all__ = ["env_verify"]


@with_options
def env_verify(
    options: Options,
    *,
    kind: Annotated[
        str | None, typer.Argument(help="MODULE:CLASS, path/to/file.py:CLASS or a built-in environment.")
    ] = None,
    env: Annotated[str | None, typer.Option("--env", help="An environment of the configuration instead.")] = None,
    params: Annotated[str, typer.Option(help="Its parameters, a JSON object.")] = "{}",
    model: Annotated[
        str | None, typer.Option(help="Folder or Hugging Face id of a model: look through its prompts, too.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a chat template, in place of the model's.")
    ] = None,
    chat_template_kwargs: Annotated[str, typer.Option(help="Parameters of the template, a JSON object.")] = "{}",
    as_json: Json = False,
) -> None:
    """Check that an environment loads, prompts, parses, scores, is deterministic and resets.

    With --model, or --config FILE --env NAME, also how its prompts are rendered for the model. Exits with 1 if a check
    fails.
    """
    config, name = _config(options, kind, env, params, chat_template_kwargs)
    given = {"model": model, "chat_template": None if chat_template is None else str(chat_template)}
    config = msgspec.structs.replace(config, **{key: value for key, value in given.items() if value is not None})
    settings = config.environments[name]
    prompts = PolicyPrompts(config)
    checks = anyio.run(verify_environment, settings.kind, settings.params, _prompt_check(prompts, name))
    if as_json:
        print_json(checks)
    else:
        print_table(("verdict", "check", "seen"), ((one.verdict, one.check, one.text) for one in checks))
    if any(one.verdict == "fail" for one in checks):
        raise typer.Exit(1)


def _config(
    options: Options, kind: str | None, name: str | None, params: str, template_kwargs: str
) -> tuple[RunConfig, str]:
    """Return a configuration with the environment that is named, and its name in there."""
    if (kind is None) == (name is None):
        raise ConfigError("name one environment: MODULE:CLASS, or --config FILE --env NAME")
    if kind is not None:
        read = read_params(params), read_params(template_kwargs)
        environment = EnvironmentConfig(kind=kind, params=read[0], chat_template_kwargs=read[1])
        return RunConfig(mode="observe", environments={"environment": environment}), "environment"
    config = options.config_with_environments()
    if name not in config.environments:
        raise ConfigError(f"environments.{name}: not configured; known: {', '.join(config.environments)}")
    settings = config.environments[name]
    if settings.is_foreign:
        raise ConfigError(f"environments.{name}: its kind is {settings.kind}, so its prompts are made elsewhere")
    return config, name


def _prompt_check(prompts: PolicyPrompts, name: str) -> Callable[[Environment], Awaitable[str]] | None:
    if not prompts.known:
        return None

    async def check(env: Environment) -> Any:
        try:
            return await prompts.describe(name, env)
        except ModuleNotFoundError as error:
            raise StartupError(f"tokenizers need the package {error.name!r}: {install_command('train')}") from error

    return check
