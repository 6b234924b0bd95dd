"""Notices that a running run's folder, or its server's store, was deleted, moved or replaced.

The server goes on as if nothing had happened, for the files that it has open live on until it closes them, and so it
acknowledges what is lost with its end. Looks at names and inodes alone; nothing is read.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Never

import anyio
import anyio.to_thread

from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import HistoryLostError
from lachesis.services.run.supervisor_lease import LOCK_FILE

__all__ = ["StorePlace", "watch_place"]

log = logging.getLogger("lachesis")

_PERIOD_S = 0.5
_LOOKS = 3
"""Looks in a row that must find the same: the server itself replaces and deletes files."""
_DELETED = " (deleted)"
"""What Linux shows after the name of an open file that has none any more."""


class _Identity(NamedTuple):
    device: int
    inode: int


class StorePlace:
    """The folder of a run and, if `store` is given, what its server keeps there, as they were at the first look."""

    def __init__(self, folder: Path, store: Path | None) -> None:
        self._folder = folder
        self._store = store
        self._known: dict[Path, _Identity] = {}
        self._missed: dict[Path, int] = {}

    def missed(self, server_pid: int | None) -> list[Path]:
        """Return what was deleted, moved or replaced.

        `server_pid`: the server's process, None where it does not run at the moment.
        """
        for path in self._paths():
            if path not in self._known and (found := _identity(path)) is not None:
                self._known[path] = found
        gone = {path for path, identity in self._known.items() if _identity(path) != identity}
        if self._store is not None and server_pid is not None:
            gone |= _deleted_files(server_pid, self._store)
        self._missed = {path: self._missed.get(path, 0) + 1 for path in gone}
        return sorted(gone) if max(self._missed.values(), default=0) >= _LOOKS else []

    def _paths(self) -> list[Path]:
        own = [self._folder, self._folder / LOCK_FILE]
        if self._store is None:
            return own
        streams: list[Path] = []
        with suppress(OSError):  # no file descriptor is left to look into a folder
            accounts = self._store / "jetstream" / "jetstream"
            for account in os.listdir(accounts):  # noqa: PTH208 - pathlib takes many times as long, twice a second
                folder = accounts / account / "streams"
                with suppress(OSError):  # it is no account's
                    streams += [folder / name for name in os.listdir(folder)]  # noqa: PTH208
        return [*own, self._store, self._store / "jetstream", *streams]


async def watch_place(config: RunConfig, server: EmbeddedServer | None) -> Never:
    """Raise `HistoryLostError` once something of the run's folder, or of its own server's store, is gone."""
    place = StorePlace(config.path, None if server is None else server.store)
    while True:
        pid = server.running_pid if server is not None else None
        missed = await anyio.to_thread.run_sync(place.missed, pid)
        if missed:
            text = _describe(config, missed)
            log.error("%s", text)
            raise HistoryLostError(text)
        await sleep_until_tick(_PERIOD_S)


def _describe(config: RunConfig, missed: list[Path]) -> str:
    """Say what is gone, the outermost alone, and what to do."""
    outer = [path for path in missed if not any(other in path.parents for other in missed)]
    named = ", ".join(map(str, outer[:3])) + (f" and {len(outer) - 3} more" if len(outer) > 3 else "")
    return (
        f"{named} was deleted, moved or replaced under the running run: what it stored there is lost or elsewhere, so "
        "it ends here, before more is acknowledged. If it was moved, move it back, and `lachesis up` goes on; if it "
        "was deleted, restore it from a backup; or, if other streams are left, `lachesis runs recover` makes the run "
        "go on with those; or begin another run (--run NAME), or give this one up: "
        f"`lachesis runs delete {config.run}`"
    )


def _identity(path: Path) -> _Identity | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return _Identity(found.st_dev, found.st_ino)


def _deleted_files(pid: int, store: Path) -> set[Path]:
    """Return the files below `store` that a process has open and that have no name any more.

    None of them where the system does not say.
    """
    found = set()
    with suppress(OSError):
        for link in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - as above
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{link}")  # noqa: PTH115
                if target.endswith(_DELETED) and target.startswith(f"{store}{os.sep}"):
                    found.add(Path(target.removesuffix(_DELETED)))
    return found
