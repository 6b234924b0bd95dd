"""Output that cannot be written is kept in bounds, and written whole and in order when there is room."""

import errno
import os
from pathlib import Path

import pytest

from lachesis.pipeline.common import late_output
from lachesis.pipeline.common.late_output import MAX_KEPT_BYTES, BufferedOutput


class Disk:
    """Stands in for `os.write` on a disk that has `room` bytes."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.error = errno.ENOSPC
        self.written = b""

    def write(self, _: int, data: bytes) -> int:
        taken = data[: self.room]
        if not taken:
            raise OSError(self.error, os.strerror(self.error))
        self.room -= len(taken)
        self.written += taken
        return len(taken)


@pytest.fixture
def drive(monkeypatch) -> Disk:
    found = Disk()
    monkeypatch.setattr(late_output.os, "write", found.write)
    return found


def test_lines_come_whole_and_in_order(drive: Disk) -> None:
    output = BufferedOutput(1)
    output.write(b"one\n")
    drive.room = 2
    output.write(b"two\n")
    output.write(b"three\n")
    assert drive.written == b"one\ntw"
    output.flush()
    drive.room = 1 << 30
    output.write(b"four\n")
    assert drive.written == b"one\ntwo\nthree\nfour\n"


def test_one_line_is_bounded_too(drive: Disk) -> None:
    output = BufferedOutput(1)
    drive.room = 0
    output.write(b"x" * (MAX_KEPT_BYTES + 1))
    drive.room = 1 << 30
    output.flush()
    assert drive.written == b"(1 lines were lost here, while the disk was full)\n"
    output.write(large := b"y" * (2 * MAX_KEPT_BYTES))
    assert drive.written.endswith(large), "where there is room, a line of any length is written"


def test_what_is_kept_is_bounded_and_what_is_lost_is_counted(drive: Disk) -> None:
    output = BufferedOutput(1)
    drive.room = 0
    line = b"x" * 1023 + b"\n"
    for _ in range(2 * MAX_KEPT_BYTES // len(line)):
        output.write(line)
    drive.room = 1 << 30
    output.flush()
    lost = MAX_KEPT_BYTES // len(line)
    assert drive.written.startswith(f"({lost} lines were lost here".encode())
    assert drive.written.count(line) == lost
    assert len(drive.written) < MAX_KEPT_BYTES + 200


def test_other_errors_are_raised(drive: Disk) -> None:
    drive.room, drive.error = 0, errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        BufferedOutput(1).write(b"one\n")


def test_a_reader_that_is_gone_ends_no_process(drive: Disk) -> None:
    drive.room, drive.error = 0, errno.EPIPE
    output = BufferedOutput(1)
    assert output.write(b"one\n") == 4
    drive.room = 1 << 30
    output.flush()
    assert drive.written == b"", "nothing waits for it"


def test_a_process_that_was_forked_does_not_write_what_its_parent_kept(drive: Disk) -> None:
    output = BufferedOutput(1)
    drive.room = 0
    output.write(b"the parent's\n")
    output.forget()
    drive.room = 1 << 30
    output.flush()
    assert drive.written == b""


def test_a_real_file_gets_what_is_written(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    with BufferedOutput(descriptor) as output:
        assert output.write(b"line\n") == 5
        assert not output.isatty()
    os.close(descriptor)  # which it leaves open
    assert (tmp_path / "log").read_bytes() == b"line\n"


def test_a_terminal_that_is_gone_ends_no_process(drive: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: True)
    output = BufferedOutput(1)
    drive.room, drive.error = 0, errno.EIO
    output.write(b"nobody reads this\n")
    drive.room = 1 << 30
    output.write(b"it is back\n")
    assert drive.written == b"it is back\n"
