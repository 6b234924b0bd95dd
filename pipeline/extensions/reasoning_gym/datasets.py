"""Datasets of reasoning-gym: imported, drawn into disjoint splits, and scored.

Only this file guarantees that the splits never share a prompt. reasoning-gym seeds item i with seed + i, so different
seeds give overlapping items. Therefore a prompt's split depends only on the prompt (its hash), whatever the seed, the
size and the parameters are. Within a split every prompt occurs once.

reasoning-gym imports `pycosat`, which needs a C compiler to install and serves one dataset (zebra_puzzles); where it is
missing, a stand-in takes its place during the import.
"""

import functools
import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NoReturn

import msgspec

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.user_code import IMPORT_LOCK
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.extensions.reasoning_gym.guard import guard_reasoning_gym
from lachesis.pipeline.tasks.splits import Split, canonical_prompt, split_of
from lachesis.schemas.errors import ConfigError

__all__ = ["create_dataset", "dataset_names", "draw", "import_reasoning_gym", "load_scorer", "score_answer"]

_MAX_DRAWS = 1000
"""Items in a row without a new prompt after which a split counts as exhausted."""
_TUPLES = {"arc_agi", "rearc"}
"""Datasets whose scorers compare metadata with tuples, which the wire turns into lists."""


def score_answer(text: str, task: Mapping[str, Any], params: Mapping[str, Any] | None = None) -> float:
    """Return reasoning-gym's score of an answer, usually in [0, 1].

    `task`: the dict of a `ReasoningGym` task.

    It may take for ever on hostile text: run it in a process of its own. If a scorer raises on an answer that it cannot
    parse, the score is 0, provided that the scorer accepts the reference answer. Otherwise the exception is raised,
    because the scorer or the task is broken.
    """
    gym = import_reasoning_gym()
    dataset = _scorer(task["dataset"], msgspec.json.encode(params or {}, order="sorted"))
    tag = task.get("answer_tag")
    answer = gym.utils.extract_answer(text, tag_name=tag) if tag else text
    metadata = task["metadata"]
    if task["dataset"] in _TUPLES:
        metadata = {key: _as_tuples(value) for key, value in metadata.items()}
    entry = {"question": task["question"], "answer": task["answer"], "metadata": metadata}
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:  # noqa: BLE001 - scorers raise anything; the next line finds out whether the answer is to blame
        dataset.score_answer(task["answer"], entry)
        return 0.0


def load_scorer(name: str, params: Mapping[str, Any] | None = None) -> None:
    """Make the next `score_answer` of dataset `name` in this process start at once.

    Importing everything takes seconds.
    """
    _scorer(name, msgspec.json.encode(params or {}, order="sorted"))


def import_reasoning_gym() -> ModuleType:
    """Return the module `reasoning_gym`. Raises StartupError, which names the missing package."""
    with IMPORT_LOCK:  # another thread could take the stand-in for the real package, or remove it
        return _import_reasoning_gym()


@functools.cache
def _import_reasoning_gym() -> ModuleType:
    missing = _import("pycosat") is None
    if missing:
        sys.modules["pycosat"] = _pycosat_stand_in()
    try:
        module = importlib.import_module("reasoning_gym")
        importlib.import_module("reasoning_gym.utils")
        guard_reasoning_gym()
    except ModuleNotFoundError as error:
        raise StartupError(
            f"reasoning-gym cannot be imported, for {error.name!r} is missing: {install_command('reasoning-gym')}"
        ) from error
    finally:
        if missing:  # removed at once: sympy uses any module with the name pycosat
            del sys.modules["pycosat"]
    return module


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _pycosat_stand_in() -> ModuleType:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise StartupError("this dataset (zebra_puzzles) needs pycosat, which needs a C compiler: pip install pycosat")

    module = ModuleType("pycosat", "Stands in for the SAT solver where it is not installed.")
    module.solve = module.itersolve = refuse  # type: ignore[attr-defined]
    return module


def create_dataset(name: str, params: Mapping[str, Any], seed: int) -> Any:
    """Return the dataset `name`.

    `params` may hold its virtual `size`, which bounds how many items can be drawn.

    Raises ConfigError when the dataset or a parameter is unknown or refused.
    """
    gym = import_reasoning_gym()
    known = gym.factory.DATASETS
    if name == "composite":
        raise ConfigError("reasoning_gym: composite mixes datasets; run one environment for each, the run mixes them")
    if name not in known:
        raise ConfigError(f"reasoning_gym: no dataset {name[:60]!r}{nearest(name, known)}")
    fields = set(known[name][1].__dataclass_fields__) - {"seed"}
    for key in params:
        if key not in fields:
            raise ConfigError(f"reasoning_gym: {name} has no parameter {key[:60]!r}{nearest(key, fields)}")
    try:
        return gym.create_dataset(name, **params, seed=seed)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning_gym: {name} refuses its parameters {dict(params)}: {error}") from error


@functools.lru_cache(maxsize=32)
def _scorer(name: str, params: bytes) -> Any:
    return create_dataset(name, {"size": 500, **msgspec.json.decode(params)}, 0)  # scoring draws no items


def draw(dataset: Any, split: Split, size: int) -> list[dict[str, Any]]:
    """Return the first `size` items of the split, by index, with new prompts.

    Raises ConfigError if there are fewer.
    """
    entries: list[dict[str, Any]] = []
    seen: set[str] = set()
    last = 0
    for index in range(len(dataset)):
        entry = dataset[index]
        prompt = canonical_prompt(entry["question"])
        if split_of(entry["question"]) == split and prompt not in seen:
            seen.add(prompt)
            entries.append(entry)
            last = index
            if len(entries) == size:
                return entries
        if index - last >= _MAX_DRAWS:
            break
    raise ConfigError(
        f"reasoning_gym: found only {len(entries)} distinct prompts for split {split!r} where size asks for {size}; "
        "ask for fewer or widen the dataset's parameters"
    )


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def dataset_names() -> list[str]:
    """Return the names of all datasets. Raises `StartupError` where reasoning-gym is not installed."""
    return sorted(import_reasoning_gym().factory.DATASETS)
