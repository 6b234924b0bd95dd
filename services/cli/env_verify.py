"""`lachesis env verify`: checks an environment without a model."""

from typing import Annotated

import anyio
import typer

from lachesis.pipeline.environments.verify import verify_environment
from lachesis.services.cli.options import Json, read_params
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
    checks = anyio.run(verify_environment, kind, read_params(params))
    if as_json:
        print_json(checks)
    else:
        print_table(("verdict", "check", "seen"), ((one.verdict, one.check, one.text) for one in checks))
    if any(one.verdict == "fail" for one in checks):
        raise typer.Exit(1)
