"""Keeps the first policy of a run until it is evaluated, so that a kill does not lose that.

All later evaluations are compared with it, and by the time of a restart its weights may have been pruned.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from lachesis.pipeline.common.fsync import make_folder, partial_of, replace_file
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import SchemaError

__all__ = ["FirstPolicy"]

_RECORD = "policy.bin"


class FirstPolicy:
    """`folder`: one inside that of the run's weights, from where inference servers read; nothing else writes there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> PolicyRecord | None:
        """Return the record of the policy that is kept; its weights are the file here. None: there is none."""
        with suppress(OSError, SchemaError):  # a damaged one is as good as none: another policy becomes the first
            record = decode(PolicyRecord, read_small_file(self._folder / _RECORD))
            if Path(record.weights).is_file():
                return record
        return None

    def keep_weights(self, record: PolicyRecord, weights: str) -> PolicyRecord:
        """Keep a policy in place of any other, with a file of its weights; return its record as `load` does.

        Raises `OSError`, for example if the file has been pruned or the disk is full.
        """
        self.drop()
        make_folder(self._folder)
        file = self._folder / Path(weights).name
        try:
            os.link(weights, file)  # takes no room
        except FileNotFoundError:
            raise
        except OSError:  # another file system, or one without links
            shutil.copyfile(weights, partial_of(file))
            partial_of(file).replace(file)
        kept = record.replace(weights=str(file))
        replace_file(self._folder / _RECORD, encode(kept))
        return kept

    def drop(self) -> None:
        """Delete what is kept."""
        shutil.rmtree(self._folder, ignore_errors=True)
