"""Finds the model that a setting names: a local folder, or a repository of the Hugging Face hub.

Guarantees an answer within seconds: a folder is inspected but its model never loaded, and the hub is queried once,
without retries. If a name is neither a folder nor a repository, the error names the nearest folder with a model.
Imports neither torch nor transformers.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx

from lachesis.pipeline.common.bounded_http import wait_for_thread
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.model.weight_headers import check_weight_files
from lachesis.schemas.errors import ConfigError

__all__ = ["ModelSource", "cannot_load", "find_model", "holds_tokenizer_alone", "read_config", "stored_folder"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_TIMEOUT_S = 5.0
_MAX_DEPTH = 4
"""Levels of folders that are searched for models."""
_MAX_FOLDERS = 2000
_MAX_NAMED = 3
_MIN_SIMILARITY = 0.6
"""Similarity (0 to 1) from which on a folder is offered as the one that was meant."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_ADAPTER_FILE = "adapter_config.json"
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")

HubAnswer = Literal["there", "absent", "refused", "unreachable", "unclear"]


class ModelSource(NamedTuple):
    """What to hand to `from_pretrained`. `local_files_only`: the hub cannot be reached, but the model is in its
    cache."""

    name: str
    local_files_only: bool = False


def holds_tokenizer_alone(name: str) -> bool:
    """Return whether `name` is a folder with a tokenizer and no model."""
    folder = Path(name)
    return not (folder / "config.json").is_file() and any((folder / file).is_file() for file in _TOKENIZER_FILES)


def find_model(
    name: str,
    *,
    weights: bool = True,
    tokenizer: bool = True,
    template: bool = True,
    exceptions: Sequence[str] = (),
) -> ModelSource:
    """Return where the model `name` is.

    Without `weights` those of a folder may have any format, as for vLLM. Without `tokenizer` it need not hold one, and
    without `template` that needs no chat template. `exceptions`: see `model_exceptions`.

    Raises `ConfigError` that says what is missing and names the nearest folder that holds a model.
    """
    folder = Path(name)
    if folder.is_dir():
        problem = _folder_problem(
            folder, weights=weights, tokenizer=tokenizer, template=template, exceptions=exceptions
        )
        if problem is not None:
            raise ConfigError(problem)
        return ModelSource(name, local_files_only=True)
    if folder.exists() or not _HUB_ID.fullmatch(name):
        raise ConfigError(f"there is no folder {name!r}{_nearest(folder)}")
    return _find_on_hub(name)


def stored_folder(name: str) -> Path | None:
    """Return the folder with the files of a model that was found; None: it is not in the cache."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def read_config(folder: Path) -> dict[str, Any]:
    """Return what the config.json of a model says. Raises `ConfigError`."""
    return _read_json(folder / "config.json")


def _folder_problem(
    folder: Path, *, weights: bool, tokenizer: bool, template: bool, exceptions: Sequence[str]
) -> str | None:
    """Return why a folder cannot be loaded, None if no fault is found.

    Raises `ConfigError` when its index names weights outside of it, and for faults in the headers of its weights.
    """
    if (folder / _ADAPTER_FILE).is_file():  # transformers would load the base that it names, and not this folder
        return (
            f"the folder {str(folder)!r} holds adapters ({_ADAPTER_FILE}), which belong to another model: merge them "
            "(peft: merge_and_unload), and give the folder that save_pretrained writes then"
        )
    if not (folder / "config.json").is_file():
        below = [str(found) for found in _models_below(folder)][:_MAX_NAMED]
        hint = f"; below it are {', '.join(below)}" if below else _nearest(folder)
        return f"the folder {str(folder)!r} holds no model: it has no config.json{hint}"
    lacking = f"the folder {str(folder)!r} holds no whole model: it has"
    config = read_config(folder)
    if "model_type" not in config:
        return f"{lacking} no model_type in config.json; give a folder written by save_pretrained"
    if weights and not any(file.is_file() for file in folder.glob("*.safetensors")):
        return f"{lacking} no *.safetensors; save it with save_pretrained(..., safe_serialization=True)"
    if weights:
        check_weight_files(folder, config, exceptions)
    return _tokenizer_problem(folder, lacking, template=template) if tokenizer else None


def _tokenizer_problem(folder: Path, lacking: str, *, template: bool) -> str | None:
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return f"{lacking} no tokenizer (tokenizer.json); save the tokenizer into the same folder"
    settings = folder / "tokenizer_config.json"
    templates = any((folder / file).exists() for file in _TEMPLATE_FILES)
    if template and settings.is_file() and not templates and not _read_json(settings).get("chat_template"):
        return (
            f"{lacking} a tokenizer without a chat template; choose an instruct model, name a template with "
            "`chat_template`, or add chat_template.jinja"
        )
    return None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_small_file(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _find_on_hub(name: str) -> ModelSource:
    try:
        from huggingface_hub import constants, get_token, try_to_load_from_cache
    except ModuleNotFoundError:
        return ModelSource(name)  # whatever loads it says which package is missing
    cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    offline = constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "").upper() in {"1", "TRUE", "YES"}
    answer: HubAnswer = "unreachable" if offline else check_hub(constants.ENDPOINT, name, get_token())
    if answer in {"there", "unclear"}:
        return ModelSource(name)
    if cached:
        return ModelSource(name, local_files_only=True)
    reasons = {
        "absent": f"{constants.ENDPOINT} has no model of that name",
        "refused": f"{constants.ENDPOINT} refuses it: accept its terms there, and set HF_TOKEN",
        "unreachable": f"{constants.ENDPOINT} " + ("is not used (HF_HUB_OFFLINE)" if offline else "cannot be reached"),
    }
    raise ConfigError(f"there is no folder {name!r}, and {reasons[answer]}{_nearest(Path(name))}")


def check_hub(endpoint: str, name: str, token: str | None) -> HubAnswer:
    """Ask once whether the hub has a model's configuration."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        place = f"{endpoint}/{name}/resolve/main/config.json"
        answer = wait_for_thread(
            partial(httpx.head, place, headers=headers, timeout=_HUB_TIMEOUT_S), 2 * _HUB_TIMEOUT_S
        )
    except httpx.HTTPError:
        return "unreachable"
    if answer is None:
        return "unreachable"
    code = answer.headers.get("x-error-code", "")
    if answer.status_code == 403 or code == "GatedRepo":
        return "refused"
    if answer.status_code in {401, 404}:  # the hub answers 401 where it does not say whether there is one
        return "absent"
    return "there" if answer.status_code < 400 else "unclear"


def _nearest(wanted: Path) -> str:
    """Return the end of a sentence that names the model folder most like `wanted`, or those that there are."""
    home = Path(os.path.expanduser(wanted))  # noqa: PTH111 - it stays as it is for a user without a home
    if wanted.parts[:1] == ("~",) and home.is_dir():
        return f"; write it without ~: {str(home)!r}"
    target = wanted.resolve()
    root = next(parent for parent in target.parents if parent.is_dir())
    roots = dict.fromkeys([Path.cwd()] if root == Path(root.anchor) else [root, Path.cwd()])
    found = {_shown(folder): folder for one in roots for folder in _models_below(one)}
    ranked = sorted(found, key=lambda shown: (-_alike(found[shown], target), shown))
    if ranked and _alike(found[ranked[0]], target) >= _MIN_SIMILARITY:
        return f"; did you mean {ranked[0]!r}?"
    if ranked:
        more = f" and {len(ranked) - _MAX_NAMED} more" if len(ranked) > _MAX_NAMED else ""
        return f"; folders with a model: {', '.join(ranked[:_MAX_NAMED])}{more}"
    return f"; no folder below {' or '.join(map(str, roots))} holds a model"


def _alike(folder: Path, target: Path) -> float:
    """Return how alike two paths are, from 0 to 1: by the whole, or by their last part."""
    common = os.path.commonpath([folder, target])
    names = folder.name.lower(), target.name.lower()
    paths = os.path.relpath(folder, common).lower(), os.path.relpath(target, common).lower()
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in (names, paths))


def _shown(folder: Path) -> str:
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def _models_below(root: Path) -> Iterator[Path]:
    """Yield the folders with a model up to `_MAX_DEPTH` levels below `root`; of a large tree, the first ones."""
    level, seen = [root], 0
    for _ in range(_MAX_DEPTH + 1):
        deeper: list[Path] = []
        for folder in level:
            seen += 1
            if seen > _MAX_FOLDERS:
                return
            files, folders = _entries(folder)
            if "config.json" in files and any(".safetensors" in file for file in files):
                yield folder
            deeper += folders
        level = deeper


def _entries(folder: Path) -> tuple[set[str], list[Path]]:
    """Return the names of the files and the folders in a folder, hidden ones left out."""
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".")]
            folders = sorted(Path(entry.path) for entry in shown if entry.is_dir(follow_symlinks=False))
            return {entry.name for entry in shown if entry.is_file()}, folders
    except OSError:
        return set(), []  # not ours to read


def cannot_load(name: str, error: Exception) -> ConfigError:
    """Return the error to raise where a model cannot be loaded."""
    reason = f"{type(error).__name__}: {error}".rstrip(".")
    return ConfigError(
        f"model {name!r} could not be loaded: {reason}. Give a folder written by save_pretrained, or the id of a "
        "causal language model on the Hugging Face hub."
    )
