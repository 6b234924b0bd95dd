"""The notices in a run's folder are the supervisor's newest, or are not there."""

import errno
from pathlib import Path

import pytest

from lachesis.pipeline.common.disk import SHORTAGES, DiskRoom
from lachesis.schemas.notices import Notice
from lachesis.services.observe.notices import supervisor_notices
from lachesis.services.run.notices_file import NoticesWriter, read_notices
from lachesis.services.run.supervisor_state import SupervisorStateWriter


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


@pytest.mark.parametrize(
    ("room", "what"),
    [
        (DiskRoom(0, 1 << 30), "is full"),
        (DiskRoom(1 << 30, 1 << 31, inodes=False), "is full"),
        (DiskRoom(1 << 30, 1 << 31), "supervisor is silent"),
        (DiskRoom(0, 0), "supervisor is silent"),
    ],
)
def test_a_supervisor_that_writes_nothing_is_silent_or_has_a_full_disk(
    room: DiskRoom, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lachesis.services.observe.notices.disk_room", lambda _: room)
    writer = SupervisorStateWriter(tmp_path)
    writer.report("running", 1, 1)
    (notice,) = supervisor_notices(tmp_path)
    assert what in notice.what
    assert notice.stops
