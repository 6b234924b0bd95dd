"""The notices of a run in its folder, and what became of its groups, as its supervisor writes them."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from lachesis.pipeline.common.disk import DeferredFile
from lachesis.schemas.notices import Notice
from lachesis.services.run.supervisor_state import ProcessRecord, read_record

__all__ = ["NOTICES_FILE", "NoticesWriter", "SavedNotices", "read_notices", "read_outcomes"]

NOTICES_FILE = "notices.json"
_FRESH_S = 10.0
"""Age from which they are not believed: the supervisor hangs, or cannot write."""
_REWRITE_S = 2.0


class SavedNotices(msgspec.Struct, frozen=True, kw_only=True):
    """What holds as of `looked_ns`, Unix ns, by the supervisor whose process is `process`.

    `outcomes`: groups by what became of them since the run began; empty before the batcher was heard.
    """

    process: ProcessRecord
    looked_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    notices: list[Notice]
    outcomes: dict[str, int] = {}

    @property
    def age_s(self) -> float:
        """Seconds since the supervisor looked."""
        return (time.time_ns() - self.looked_ns) / 1e9


class NoticesWriter:
    """Writes what holds when it changes, and every few seconds that it is so still."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NOTICES_FILE
        self.file = DeferredFile(self._path)
        self._process = ProcessRecord.current()
        self._written: SavedNotices | None = None

    def write(self, notices: Sequence[Notice], outcomes: Mapping[str, int] | None = None) -> None:
        """Write them if need be; what cannot be written now does not leave there what holds no more."""
        last = self._written
        if last is not None and last.age_s < _REWRITE_S and last.notices == list(notices):  # outcomes may wait
            return
        self._written = SavedNotices(
            process=self._process, looked_ns=time.time_ns(), notices=list(notices), outcomes=dict(outcomes or {})
        )
        self.file.write(msgspec.json.encode(self._written))
        if self.file.is_late:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)  # readers ask the supervisor itself, by its heartbeats


def read_notices(folder: Path) -> list[Notice] | None:
    """Return the notices of the supervisor that runs here.

    None where none does, or it says nothing any more.
    """
    saved = _read(folder)
    return None if saved is None else saved.notices


def read_outcomes(folder: Path) -> dict[str, int]:
    """Return the groups of a run that goes on by what became of them; empty where that is not known."""
    saved = _read(folder)
    return {} if saved is None else saved.outcomes


def _read(folder: Path) -> SavedNotices | None:
    saved = read_record(folder / NOTICES_FILE, SavedNotices)
    if saved is None or saved.process.runs is not True or saved.age_s > _FRESH_S:
        return None
    return saved
