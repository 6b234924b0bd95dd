"""`lachesis env list`: what can be an environment on this machine."""

from lachesis.pipeline.environments.gym_datasets import import_reasoning_gym
from lachesis.pipeline.environments.load import BUILTIN
from lachesis.schemas.errors import StartupError
from lachesis.services.output import print_json

__all__ = ["list_environments"]


def list_environments(*, as_json: bool) -> None:
    """Print the built-in environments and the datasets of reasoning-gym, if it is installed."""
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
