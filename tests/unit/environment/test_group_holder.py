"""A process' name passes to its successor once it has ended, and to no process beside it."""

from pathlib import Path

from lachesis.pipeline.environment.group_holder import holder_name


def test_a_successor_has_the_name_and_a_second_process_or_one_in_another_folder_has_not(tmp_path: Path) -> None:
    with holder_name(tmp_path / "one", "environment-words-1") as first:
        with holder_name(tmp_path / "one", "environment-words-1") as beside:
            assert beside != first
        with (
            holder_name(tmp_path / "one", "environment-words-2") as other,
            holder_name(tmp_path / "two", "environment-words-1") as elsewhere,
        ):
            assert len({first, other, elsewhere}) == 3
    with holder_name(tmp_path / "one", "environment-words-1") as successor:
        assert successor == first


def test_a_damaged_file_is_written_anew(tmp_path: Path) -> None:
    with holder_name(tmp_path, "e") as first:
        pass
    (tmp_path / "holders" / "e").write_bytes(b"\xff\xfe and more")
    with holder_name(tmp_path, "e") as second:
        assert second != first
    with holder_name(tmp_path, "e") as third:
        assert third == second


def test_where_nothing_can_be_written_each_process_has_a_name_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with holder_name(file, "e") as first:
        pass
    with holder_name(file, "e") as second:
        assert first != second
        assert first.startswith("e.")
