"""`lachesis env verify`: checks an environment without a model."""

from typing import Annotated, Any

import anyio
import msgspec
import typer

from lachesis.pipeline.environments.verify import verify_environment
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.options import Json
from lachesis.services.output import print_json, print_table

__all__ = ["env_verify"]


def env_verify(
    kind: Annotated[str, typer.Argument(help="MODULE:CLASS, path/to/file.py:CLASS or a built-in environment.")],
    params: Annotated[str, typer.Option(help="Its parameters, a JSON object.")] = "{}",
    as_json: Json = False,
) -> None:
    """Check that an environment loads, prompts, parses, scores, is deterministic and resets.

    Exits with 1 if a check fails.
    """
    try:
        given = msgspec.json.decode(params, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--params {params!r} is no JSON object: {error}") from error
    checks = anyio.run(verify_environment, kind, given)
    if as_json:
        print_json(checks)
    else:
        print_table(("verdict", "check", "seen"), ((one.verdict, one.check, one.text) for one in checks))
    if any(one.verdict == "fail" for one in checks):
        raise typer.Exit(1)
