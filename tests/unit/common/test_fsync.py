"""What is waited for, and that no descriptor is left behind."""

import os
from pathlib import Path

import pytest

from lachesis.pipeline.common.fsync import fsync, replace_file


@pytest.mark.parametrize("name", ["a file", "."])
def test_a_file_and_a_folder_are_synced_and_closed_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").write_bytes(b"x")
    synced: list[tuple[int, os.stat_result]] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append((descriptor, os.fstat(descriptor))))
    fsync(tmp_path / name)
    ((descriptor, seen),) = synced
    assert os.path.samestat(seen, (tmp_path / name).stat())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_sync_that_fails_is_told_and_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def fail(descriptor: int) -> None:
        opened.append(descriptor)
        raise OSError("no room")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no room"):
        fsync(tmp_path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_of_two_writers_at_once_one_counts_and_neither_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, sync = tmp_path / "url", os.fsync

    def other_writes(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        replace_file(file, b"other")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", other_writes)
    replace_file(file, b"mine")
    assert file.read_bytes() == b"other"
    assert [one.name for one in tmp_path.iterdir()] == ["url"]
