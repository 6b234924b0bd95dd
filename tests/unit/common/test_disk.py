"""What counts as a full disk, what is missing on it, and that a write waits for room and says so once."""

import errno
import logging
import shutil
from pathlib import Path

import anyio
import pytest

from lachesis.pipeline.common import disk
from lachesis.pipeline.common.disk import (
    SHORTAGES,
    DeferredFile,
    DiskRoom,
    disk_room,
    is_disk_full,
    missing_bytes,
    write_when_room,
    write_when_room_sync,
)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(disk, "RETRY_S", 0.001)


def full(path: Path) -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", str(path))


class Writer:
    """Meets a full disk so many times, then writes."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures = failures
        self.error = error
        self.calls = 0
        self.notes: list[str | None] = []

    def __call__(self) -> str:
        self.calls += 1
        self.notes.append(SHORTAGES.longest_wait_text)
        if self.calls <= self.failures:
            raise self.error
        return "written"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (OSError("without a number"), False),
        (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (Exception("Disk quota exceeded (os error 122)"), True),
        (Exception("No such file or directory (os error 2)"), False),
        (shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")]), True),
        (ValueError("28"), False),
    ],
)
def test_a_full_disk_is_told_from_every_other_error(error: Exception, expected: bool) -> None:
    assert is_disk_full(error) is expected


def test_a_large_write_leaves_room_to_others() -> None:
    assert missing_bytes(DiskRoom(20 * MIB, 100 * MIB), 10 * MIB) == 0
    assert missing_bytes(DiskRoom(19 * MIB, 100 * MIB), 10 * MIB) == MIB
    assert missing_bytes(DiskRoom(10 * MIB, 100 * MIB), 1000 * MIB) == (1000 - 10) * MIB + disk.MAX_RESERVE_BYTES
    assert missing_bytes(DiskRoom(0, 0), 10 * MIB) == 0  # a file system that does not say


def test_the_room_of_a_folder_that_is_not_there_is_that_of_its_parent(tmp_path: Path) -> None:
    there = disk_room(tmp_path)
    assert there.total_bytes > 0
    assert disk_room(tmp_path / "not" / "there").total_bytes == there.total_bytes


@pytest.mark.parametrize("waits", [False, True])
async def test_a_write_waits_for_room_and_says_so_once(tmp_path: Path, caplog, waits: bool) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "file"
    writer = Writer(3, full(path))
    if waits:
        assert await write_when_room(path, writer) == "written"
    else:
        assert write_when_room_sync(path, writer) == "written"
    assert writer.calls == 4
    assert writer.notes[0] is None
    assert all(str(path) in str(note) and "bytes missing" in str(note) for note in writer.notes[1:])
    assert SHORTAGES.longest_wait_text is None
    said = [record.message for record in caplog.records if str(path) in record.message]
    assert len(said) == 2
    assert "the disk is full: at least 4,096 bytes missing" in said[0]
    assert "waits for room no more" in said[1]


async def test_two_writes_to_one_disk_are_one_shortage(tmp_path: Path, caplog) -> None:
    async with anyio.create_task_group() as tasks:
        for name in ("a", "b"):
            tasks.start_soon(write_when_room, tmp_path / name, Writer(20, full(tmp_path / name)))
    assert sum("the disk is full" in record.message for record in caplog.records) == 1


async def test_a_quota_is_named(tmp_path: Path) -> None:
    writer = Writer(1, OSError(errno.EDQUOT, "Disk quota exceeded"))
    await write_when_room(tmp_path / "file", writer)
    assert "a quota is used up" in str(writer.notes[1])


async def test_other_errors_are_raised_and_nothing_stays_said(tmp_path: Path) -> None:
    with pytest.raises(PermissionError):
        await write_when_room(tmp_path / "file", Writer(1, PermissionError(errno.EACCES, "Permission denied")))
    assert SHORTAGES.longest_wait_text is None


async def test_a_wait_that_is_cancelled_is_over(tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write_when_room, path, Writer(1_000_000, full(path)))
        while SHORTAGES.longest_wait_text is None:  # noqa: ASYNC110
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert SHORTAGES.longest_wait_text is None


async def test_what_surely_does_not_fit_is_not_begun(tmp_path: Path, monkeypatch) -> None:
    writer, rooms = Writer(0, full(tmp_path)), iter([DiskRoom(5, 100), DiskRoom(9, 100), DiskRoom(20, 100)])
    monkeypatch.setattr(disk, "disk_room", lambda _: next(rooms))
    await write_when_room(tmp_path / "file", writer, needed_bytes=10)
    assert writer.calls == 1
    assert next(rooms, None) is None


def test_a_late_file_has_the_newest_content_once_there_is_room(tmp_path: Path, monkeypatch) -> None:
    file = DeferredFile(tmp_path / "pids.json")
    file.write(b"first")
    write = Path.write_bytes

    def none(path: Path, data: bytes) -> int:
        write(path, data[:2])
        raise full(path)

    monkeypatch.setattr(Path, "write_bytes", none)
    file.write(b"second")
    file.write(b"third")
    assert (tmp_path / "pids.json").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["pids.json"]
    assert SHORTAGES.longest_wait_text is not None
    monkeypatch.setattr(Path, "write_bytes", write)
    file.retry()
    assert (tmp_path / "pids.json").read_bytes() == b"third"
    assert SHORTAGES.longest_wait_text is None


def test_a_late_file_waits_for_whatever_keeps_it_from_being_written(tmp_path: Path, monkeypatch, caplog) -> None:
    file = DeferredFile(tmp_path / "pids.json")
    with monkeypatch.context() as patched:
        fails = OSError(errno.EMFILE, "Too many open files")

        def refuse(*_: object) -> int:
            raise fails

        patched.setattr(Path, "write_bytes", refuse)
        file.write(b"1")
        file.write(b"2")
        fails = OSError(errno.EROFS, "Read-only file system")
        file.write(b"3")
        assert file.is_late
    assert [record.getMessage().rpartition(": ")[2].partition("]")[2].strip() for record in caplog.records] == [
        "Too many open files",
        "Read-only file system",
    ]
    file.retry()
    assert not file.is_late
    assert (tmp_path / "pids.json").read_bytes() == b"3"
