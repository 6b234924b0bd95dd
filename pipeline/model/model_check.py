"""Checks a model without loading it: names, shapes and dtypes of its tensors; of a small one, values.

It is given the name of a model with files on this machine. Guarantees the verdict that `load_model` would give, with
two exceptions that the text names: the values of a model beyond `VALUE_BYTES`, and a model that is not downloaded yet.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lachesis.pipeline.model.completeness import (
    add_faults_of_values,
    add_loading_faults,
    add_tied_fault,
    add_tokenizer_faults,
    tied_pairs,
)
from lachesis.pipeline.model.faults import ModelFaults, is_spare
from lachesis.pipeline.model.policy import ModelSetup, find_with_tokenizer, load_files
from lachesis.pipeline.model.shards import weight_file_names
from lachesis.pipeline.model.source import cannot_load, read_config, stored_folder
from lachesis.pipeline.model.tensors import vocabulary_of
from lachesis.pipeline.model.weight_headers import check_weight_files
from lachesis.schemas.errors import ConfigError

__all__ = ["VALUE_BYTES", "check_model"]

VALUE_BYTES = 1 << 30
"""Bytes of weights up to which their values are looked at: a second or two."""
_ROWS_ELEMENTS = 1 << 24
"""Elements that are compared at a time."""


def check_model(name: str, setup: ModelSetup, problem_of: Callable[[Any], str | None] | None = None) -> str:
    """Return what the model is.

    `problem_of` is given the model, without its weights, and says what else is wrong. Raises `ConfigError` for that,
    and as `load_model` does.
    """
    source, tokenizer = find_with_tokenizer(name, setup)
    folder = stored_folder(source.name)
    if folder is None or not (Path(name).is_dir() or _is_downloaded(folder)):
        return "its weights are not on this machine yet; they are checked when they are loaded"
    config = read_config(folder)
    check_weight_files(folder, config, setup.exceptions)
    device = "meta" if find_spec("accelerate") is not None else None  # without it transformers has to load the weights
    try:
        model, info = load_files(source, setup, device_map=device)
    except Exception as error:  # transformers raises whatever its parsing of a damaged folder runs into
        raise cannot_load(source.name, error) from error
    faults = ModelFaults(setup.exceptions)
    add_loading_faults(faults, model, info, config, images=setup.images)
    if (rows := vocabulary_of(model)) is not None:
        add_tokenizer_faults(faults, tokenizer, rows)
    with ExitStack() as files:
        paths = [folder / one for one in weight_file_names(folder)]
        opened = [files.enter_context(safe_open(path, framework="pt")) for path in paths]
        stored = {tensor: one for one in opened for tensor in one.keys()}  # noqa: SIM118 - not a mapping
        for target, source_name in tied_pairs(model).items():
            if target in stored and source_name in stored and not _equal(stored, target, source_name):
                add_tied_fault(faults, target, source_name)
        whole = sum(path.stat().st_size for path in paths) <= VALUE_BYTES
        if whole:
            _add_value_faults(faults, stored, config, images=setup.images)
    if (problem := faults.text(source.name)) is not None:
        raise ConfigError(f"model {source.name!r} is incomplete or wrong: {problem}")
    if problem_of is not None and (problem := problem_of(model)) is not None:
        raise ConfigError(problem)
    text = f"{type(model).__name__}, {sum(one.numel() for one in model.parameters()):,} parameters"
    return text + ("; their values are looked at when it is loaded" if not whole else "")


def _is_downloaded(folder: Path) -> bool:
    return all((folder / one).is_file() for one in weight_file_names(folder))


def _equal(stored: dict[str, Any], first: str, second: str) -> bool:
    """Return whether two tensors of the files have the same values, a part at a time."""
    a, b = stored[first].get_slice(first), stored[second].get_slice(second)
    shape = a.get_shape()
    if shape != b.get_shape():
        return False
    rows = max(1, _ROWS_ELEMENTS // max(1, shape[-1]))
    return all(torch.equal(a[start : start + rows], b[start : start + rows]) for start in range(0, shape[0], rows))


def _add_value_faults(faults: ModelFaults, stored: dict[str, Any], config: dict[str, Any], *, images: bool) -> None:
    names = (name for name in sorted(stored) if not is_spare(name, config, images=images))
    add_faults_of_values(faults, ((name, stored[name].get_tensor(name)) for name in names))
