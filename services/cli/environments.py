"""`lachesis env`: what can be an environment on this machine, and a new one to begin with."""

import typer

from lachesis.pipeline.environments.load import BUILTIN
from lachesis.pipeline.tasks.gym_datasets import import_reasoning_gym
from lachesis.schemas.errors import StartupError
from lachesis.services.cli.env_new import env_new
from lachesis.services.cli.env_test import env_test
from lachesis.services.cli.env_verify import env_verify
from lachesis.services.cli.options import Json
from lachesis.services.output import print_json

__all__ = ["env_app", "env_list"]

env_app = typer.Typer(help="Environments.", no_args_is_help=True)
env_app.command("new")(env_new)
env_app.command("test")(env_test)
env_app.command("verify")(env_verify)


@env_app.command("list")
def env_list(as_json: Json = False) -> None:
    """List the built-in environments and their tasks."""
    datasets, missing = _datasets()
    if as_json:
        print_json({"builtin": sorted(BUILTIN), "reasoning_gym": datasets, "missing": missing})
        return
    print("built in: " + ", ".join(sorted(BUILTIN)))
    print("your own: module:Class, or path/to/file.py:Class")
    if missing:
        print(f"reasoning_gym: {missing}")
    else:
        print(f"reasoning_gym: {len(datasets)} datasets, as params.dataset")
        print("\n".join(f"  {name}" for name in datasets))


def _datasets() -> tuple[list[str], str | None]:
    try:
        gym = import_reasoning_gym()
    except StartupError as error:
        return [], str(error)
    return sorted(gym.factory.DATASETS), None
