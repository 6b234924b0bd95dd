"""The index of a large data set in the user's cache."""

import os
import time
from pathlib import Path

from lachesis.pipeline.tasks.row_index import RowIndex, load_index, save_index


def test_what_a_killed_writer_left_is_removed_and_nothing_that_is_being_written(tmp_path: Path) -> None:
    left, under_way = tmp_path / "a.index.123", tmp_path / "b.index.456"
    left.write_bytes(b"half")
    under_way.write_bytes(b"half")
    os.utime(left, (time.time() - 7200,) * 2)
    index = RowIndex(lines=[], places=bytes(8), keys=bytes(8), doubts=[])
    save_index(tmp_path / "c.index", index)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["b.index.456", "c.index"]
    assert load_index(tmp_path / "c.index", 0) is not None
