"""The notices in a run's folder are the supervisor's newest, or are not there."""

import errno
from pathlib import Path

import pytest

from lachesis.pipeline.disk import SHORTAGES
from lachesis.schemas.notices import Notice
from lachesis.services.run.notices_file import NoticesWriter, read_notices


def test_what_the_disk_has_no_room_for_does_not_leave_what_held_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, full_disk = NoticesWriter(tmp_path), Notice(key="disk/full", source="nats-server", what="the disk is full")
    writer.write([])
    assert read_notices(tmp_path) == []

    def full(path: Path, _: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        writer.write([full_disk])
        assert read_notices(tmp_path) is None
        assert SHORTAGES.longest_wait_text is not None
    writer.file.retry()
    assert read_notices(tmp_path) == [full_disk]
    assert SHORTAGES.longest_wait_text is None
