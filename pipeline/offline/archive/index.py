"""Stores on disk the facts that one pass over the streams collects for the next one.

Memory use therefore does not grow with the length of the history.

A SQLite file without a name: whatever ends the process, the file is gone with it, and nothing is left to clean up.
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.offline.replay.selected import SelectedRollout
from lachesis.schemas.errors import ConfigError

__all__ = ["Index"]

_TABLES = """
CREATE TABLE selected (seq INTEGER PRIMARY KEY, grp BLOB NOT NULL, env TEXT NOT NULL);
CREATE INDEX by_group ON selected (grp);
CREATE TABLE derived (kind TEXT, grp BLOB, data BLOB NOT NULL, PRIMARY KEY (kind, grp)) WITHOUT ROWID;
CREATE TABLE ended (seq INTEGER PRIMARY KEY, data BLOB NOT NULL);
"""
_PAGE_ROWS = 512


class Index:
    """Use `open`. Calls block for the time that the disk takes; they are short."""

    def __init__(self, database: sqlite3.Connection, folder: Path) -> None:
        self._database = database
        self._folder = folder

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[Self]:
        """Yield an empty index whose file is in `folder`. Raises `ConfigError` where none can be made there."""
        path = folder / f".lachesis-index-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                database.execute("PRAGMA journal_mode=OFF")
                database.execute("PRAGMA synchronous=OFF")
                database.execute("PRAGMA temp_store=MEMORY")
                database.executescript(_TABLES)
            finally:
                path.unlink(missing_ok=True)
        except sqlite3.Error as error:
            raise ConfigError(
                f"{folder}: an index cannot be made there ({error}); make room on that disk, or take another"
            ) from error
        try:
            yield cls(database, folder)
        finally:
            database.close()

    def select(self, found: Iterable[SelectedRollout]) -> None:
        """Remember where groups are stored."""
        self._many(
            "INSERT OR IGNORE INTO selected VALUES (?, ?, ?)", ((one.seq, _key(one.group), one.env) for one in found)
        )

    def has(self, group: str) -> bool:
        """Return whether a group is stored anywhere."""
        return self._one("SELECT 1 FROM selected WHERE grp = ? LIMIT 1", _key(group)) is not None

    def pages(self) -> Iterator[list[SelectedRollout]]:
        """Yield what is selected, in order, in parts."""
        after = 0
        while True:
            rows = self._database.execute(
                "SELECT seq, grp, env FROM selected WHERE seq > ? ORDER BY seq LIMIT ?", (after, _PAGE_ROWS)
            ).fetchall()
            if not rows:
                return
            yield [SelectedRollout(env, seq, group.hex()) for seq, group, env in rows]
            after = rows[-1][0]

    def remember_derived(self, kind: str, items: Iterable[tuple[str, bytes]]) -> None:
        """Remember what was derived of groups.

        Of each kind the first counts, and of groups that are selected alone.
        """
        self._many(
            "INSERT OR IGNORE INTO derived SELECT ?1, ?2, ?3 WHERE EXISTS (SELECT 1 FROM selected WHERE grp = ?2)",
            ((kind, _key(group), data) for group, data in items),
        )

    def derived(self, kind: str, group: str) -> bytes | None:
        return self._one("SELECT data FROM derived WHERE kind = ? AND grp = ?", kind, _key(group))

    def end(self, items: Iterable[tuple[int, bytes]]) -> None:
        """Remember what became of rollouts, by sequence; of those that are selected alone."""
        self._many(
            "INSERT OR IGNORE INTO ended SELECT ?1, ?2 WHERE EXISTS (SELECT 1 FROM selected WHERE seq = ?1)", items
        )

    def ended(self, seq: int) -> bytes | None:
        return self._one("SELECT data FROM ended WHERE seq = ?", seq)

    def _many(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        with self._describe_os_errors():
            self._database.execute("BEGIN")
            self._database.executemany(statement, rows)
            self._database.execute("COMMIT")

    def _one(self, statement: str, *values: object) -> bytes | None:
        with self._describe_os_errors():
            row = self._database.execute(statement, values).fetchone()
        return row[0] if row else None

    @contextmanager
    def _describe_os_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise InfrastructureError(
                f"{self._folder}: an index of what is stored cannot be written ({error}); make room on that disk"
            ) from error


def _key(group: str) -> bytes:
    return bytes.fromhex(group)
