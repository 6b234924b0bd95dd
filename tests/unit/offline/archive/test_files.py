"""Files that are whole or not there: one writer at a time, also where one ends as the next begins."""

import fcntl

import pytest

from lachesis.pipeline.offline.archive.files import whole_file
from lachesis.schemas.errors import ConfigError


def test_the_second_of_two_exports_is_refused_and_the_first_goes_on(tmp_path):
    place = tmp_path / "out.jsonl"
    with whole_file(place, overwrite=True) as first:
        first.write(b"first")
        with pytest.raises(ConfigError, match="another export is writing"), whole_file(place, overwrite=True):
            pass
    assert place.read_bytes() == b"first"


def test_a_file_that_another_export_has_just_finished_is_not_emptied(tmp_path, monkeypatch):
    """The other one ends between the opening of the file and its lock."""
    place, lock = tmp_path / "out.jsonl", fcntl.flock
    (tmp_path / "out.jsonl.partial").write_bytes(b"finished")

    def finish_other(file, how):
        (tmp_path / "out.jsonl.partial").replace(place)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", finish_other)
    with pytest.raises(ConfigError, match="another export is writing"), whole_file(place, overwrite=True):
        pass
    assert place.read_bytes() == b"finished"
