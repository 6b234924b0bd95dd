"""Runs an agent that is a Python function as one sample: `python function_program.py FOLDER PLACE`.

It calls the function with the task (`item`, `prompt`, `messages`; with `reward = "program"` also `task`) and reports
what it returns as the reward of the sample. It imports the standard library alone, so that the interpreter may be one
that lacks this package. Guarantees that modules beside this file do not hide those of the function.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["load_function", "reward_report"]


def main() -> None:
    """Run the function that the command line names on the sample's task."""
    folder, place = sys.argv[1:]
    sys.path[0] = folder  # it was the folder of this file
    function = load_function(place)
    task = json.loads(Path(os.environ["LACHESIS_TASK"]).read_bytes())
    value = function(task)
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    if value is not None:
        _post(reward_report(value, place))


def load_function(place: str) -> Callable[[Any], Any]:
    """Return the function at `module:name` or `FILE.py:name`. Exits with a message if there is none."""
    source, _, name = place.rpartition(":")
    module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    function = getattr(module, name, None)
    if not callable(function):
        raise SystemExit(f"{place}: {source} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def reward_report(value: Any, place: str) -> dict[str, Any]:
    """Return the report of what `place` has returned: a number, or several by name; None: unknown.

    Exits with a message if it is anything else.
    """
    if isinstance(value, Mapping) and value:
        return {"rewards": {str(name): _number(one, place) for name, one in value.items()}}
    return {"reward": _number(value, place)}


def _number(value: Any, place: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise SystemExit(
            f"{place} returned {value!r:.80}: a reward is a finite number, several of them by name, or None where "
            "nothing is to be reported"
        )
    return number


def _load_file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def _awaited(value: Any) -> Any:
    return await value


def _post(report: dict[str, Any]) -> None:
    request = urllib.request.Request(  # noqa: S310 - the address is that of the session
        os.environ["LACHESIS_SESSION_URL"] + "/reward",
        json.dumps(report).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60):  # noqa: S310 - the address is that of the session
            pass
    except urllib.error.HTTPError as error:
        raise SystemExit(f"the reward is refused: {error.read().decode(errors='replace')[:500]}") from error


if __name__ == "__main__":
    main()
