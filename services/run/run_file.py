"""Writes and reads the configuration that a run uses, `run.toml` in its folder.

`--run NAME` reads it, and every service gets it. Guarantees that the file is there whole or not at all, that only this
user can read it (an address may hold a password), that it belongs to its folder wherever that is moved, and that no
user's file is overwritten: beside a `run.toml` that was written by hand it is `run.effective.toml`.
"""

from functools import partial
from pathlib import Path

import msgspec

from lachesis.pipeline.common.disk import write_when_room
from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.common.small_files import read_small_text
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.toml import to_toml
from lachesis.schemas.errors import ConfigError
from lachesis.services.run.file_names import EFFECTIVE_FILE, RUN_FILE

__all__ = ["EFFECTIVE_FILE", "MODEL_FILE", "RUN_FILE", "is_written_here", "run_file", "run_file_of", "write_run_file"]

MODEL_FILE = "first_model.json"
"""Notes the model of the first start."""
_MARK = "# The configuration of run "
_HEADER = """\
# The configuration of run {run} as it was started last: file, variables and --set together; written by `lachesis up`.
# To begin another run with it, copy it, give that a `run` of its own and leave out `folder`.
"""


def run_file(folder: Path) -> Path | None:
    """Return the configuration that a run left in its folder, None if there is none."""
    return next((file for file in (folder / EFFECTIVE_FILE, folder / RUN_FILE) if file.is_file()), None)


def run_file_of(config: RunConfig) -> Path:
    """Return where the configuration of a run is written."""
    file = config.path / RUN_FILE
    return file if is_written_here(file) or not file.exists() else config.path / EFFECTIVE_FILE


def is_written_here(file: Path) -> bool:
    """Whether a configuration was written by `write_run_file`, not by hand."""
    try:
        return read_small_text(file).startswith(_MARK)
    except OSError:
        return False


async def write_run_file(config: RunConfig) -> Path:
    """Write the configuration into the run's folder, when there is room, unless the same is there.

    Return its path.
    """
    file = run_file_of(config)
    if _says(file, config):
        return file
    text = _HEADER.format(run=config.run) + to_toml(msgspec.structs.replace(config, folder="."))
    await write_when_room(file, partial(replace_file, file, text.encode(), private=True))
    return file


def _says(file: Path, config: RunConfig) -> bool:
    wanted = msgspec.structs.replace(config, folder=str(config.path))
    try:
        return file.is_file() and load(run_config_type(), file=file).config == wanted
    except ConfigError:
        return False  # another build's, or one that was edited badly: it is rewritten
