"""Notes the model that a run began with, and says when another one lies there at a later start.

Of a folder the names, sizes and both ends of each file are compared, of a model of the hub its name. A large file is
not read whole, so a change in its midst alone is not seen.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lachesis.pipeline.common.doctor_finding import DoctorFinding, warn
from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.config.run import RunConfig
from lachesis.services.run.run_file import MODEL_FILE

__all__ = ["FirstModel", "find_changed_model", "note_model"]

_END_BYTES = 1 << 20
_ENDINGS = frozenset({".safetensors", ".bin", ".json", ".model", ".jinja", ".gguf"})
_MAX_NAMED = 3


class FirstModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a run's first start: what the configuration called it, and its files, each with size and digest."""

    model: str
    files: dict[str, tuple[int, str]] = {}


def note_model(config: RunConfig) -> None:
    """Note the model unless one is noted already, if the run has a folder that can be written."""
    path = _record_path(config)
    if config.model is None or path.exists() or not config.path.is_dir():
        return
    try:
        replace_file(path, msgspec.json.encode(_described(config.model)))
    except OSError:
        return


def find_changed_model(config: RunConfig) -> Iterator[DoctorFinding]:
    """Yield a finding where the model is not the one that the run began with."""
    try:
        first = msgspec.json.decode(read_small_file(_record_path(config)), type=FirstModel)
        now = _described(config.model) if config.model is not None else None
    except (OSError, msgspec.MsgspecError, RecursionError):
        return  # a model that cannot be read is named by what loads it
    if now is None:
        return
    if now.files == first.files and (now.files or now.model == first.model):
        return
    names = [name for name in sorted({*now.files, *first.files}) if now.files.get(name) != first.files.get(name)]
    what = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
    text = f"{config.model} is not the model that run {config.run} began with ({first.model})"
    text += f": {what} differ" if names else ""
    kept = "the trained policy goes on from its newest checkpoint, and does not become this model"
    if config.training.learner.loss.kl_coef:
        kept += ", but the loss now keeps it near to this one (training.learner.loss.kl_coef)"
    yield warn("model", f"{text}; {kept}", "put the former model back, or give the run another name to train this one")


def _record_path(config: RunConfig) -> Path:
    return config.path / MODEL_FILE


def _described(model: str) -> FirstModel:
    folder = Path(model)
    if not folder.is_dir():
        return FirstModel(model=model)
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in _ENDINGS and path.is_file():
            found[path.name] = (path.stat().st_size, _digest(path))
    return FirstModel(model=model, files=found)


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=12)
    with path.open("rb") as file:
        digest.update(file.read(_END_BYTES))
        file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - _END_BYTES))
        digest.update(file.read(_END_BYTES))
    return digest.hexdigest()
