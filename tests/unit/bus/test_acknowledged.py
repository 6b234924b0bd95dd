"""What a server acknowledged is remembered by its writer, also beyond the writer's end."""

import os
import stat
from pathlib import Path

import pytest

from lachesis.pipeline.bus.acknowledged import ACKNOWLEDGED, AcknowledgedEnds, digest_of, read_acknowledged
from lachesis.pipeline.bus.api import PubAck
from lachesis.pipeline.errors import HistoryLostError
from lachesis.schemas.subjects import EVENTS, LEDGER, ROLLOUTS


def kept_in(folder: Path, name: str = "scorer") -> AcknowledgedEnds:
    ends = AcknowledgedEnds()
    ends.keep_in(folder, name)
    return ends


def record(ends: AcknowledgedEnds, seq: int, stream: str = ROLLOUTS, *, duplicate: bool = False) -> None:
    ends.record(PubAck(stream, seq, duplicate), f"id-{seq}", after=ends.newest.get(stream, 0))


def sequences(folder: Path) -> dict[str, list[tuple[str, int]]]:
    return {name: sorted((ack.stream, ack.seq) for ack in acks) for name, acks in read_acknowledged(folder)}


def test_a_new_message_at_an_acknowledged_sequence_is_refused():
    ends = AcknowledgedEnds()
    record(ends, 7)
    record(ends, 3, EVENTS)
    for seq in (7, 6, 1):
        with pytest.raises(HistoryLostError, match=rf"sequence {seq}, .* up to sequence 7 .* least {8 - seq} of them"):
            record(ends, seq)
    assert ends.newest == {ROLLOUTS: 7, EVENTS: 3}


def test_acknowledgements_may_come_late_and_duplicates_are_old():
    ends = AcknowledgedEnds()
    ends.record(PubAck(ROLLOUTS, 9, duplicate=False), "b", after=0)
    ends.record(PubAck(ROLLOUTS, 8, duplicate=False), "a", after=0)  # both were under way at once
    record(ends, 2, duplicate=True)
    assert ends.newest == {ROLLOUTS: 9}


def test_a_stream_that_was_deleted_begins_anew(tmp_path):
    ends = kept_in(tmp_path)
    record(ends, 9)
    record(ends, 4, EVENTS)
    ends.forget(ROLLOUTS)
    record(ends, 5, EVENTS)
    assert sequences(tmp_path) == {"scorer": [(EVENTS, 5)]}
    record(ends, 1)
    assert sequences(tmp_path) == {"scorer": [(EVENTS, 5), (ROLLOUTS, 1)]}


def test_what_is_behind_a_deleted_stream_stays_known(tmp_path):
    ends = kept_in(tmp_path)
    record(ends, 9)
    record(ends, 4, EVENTS)
    ends.forget(ROLLOUTS)
    ends.close()
    later = kept_in(tmp_path)
    record(later, 7, LEDGER)
    record(later, 5, EVENTS)
    assert sequences(tmp_path) == {"scorer": [(EVENTS, 4), (EVENTS, 5), (LEDGER, 7)]}


def test_what_earlier_connections_and_processes_had_acknowledged_stays_known(tmp_path):
    ends = kept_in(tmp_path)
    for seq in (4, 5, 6):
        record(ends, seq)
    ends.mark_reconnected()
    ends.mark_reconnected()  # without a message between them
    record(ends, 8)
    assert sequences(tmp_path) == {"scorer": [(ROLLOUTS, 6), (ROLLOUTS, 8)]}
    ends.close()
    later = kept_in(tmp_path)
    record(later, 9)
    assert sequences(tmp_path) == {"scorer": [(ROLLOUTS, 6), (ROLLOUTS, 8), (ROLLOUTS, 9)]}
    for seq in range(10, 30):
        later.mark_reconnected()
        record(later, seq)
    assert sequences(tmp_path) == {"scorer": [(ROLLOUTS, seq) for seq in (26, 27, 28, 29)]}
    [(_, acks)] = read_acknowledged(tmp_path)
    assert digest_of("id-29") in {ack.digest for ack in acks}


def test_processes_of_one_name_share_no_file(tmp_path):
    first, second = kept_in(tmp_path), kept_in(tmp_path)
    record(first, 1)
    record(second, 2)
    assert sorted(file.name for file in (tmp_path / ACKNOWLEDGED).iterdir()) == ["scorer.0", "scorer.1"]
    assert [acks[0].seq for _, acks in read_acknowledged(tmp_path)] == [1, 2]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / ACKNOWLEDGED).iterdir()}
    assert modes == {0o600}


def test_a_bus_that_stores_nothing_writes_no_file_and_no_folder_is_made(tmp_path):
    kept_in(tmp_path).close()
    record(kept_in(tmp_path / "elsewhere"), 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 5, 16, 20, 50])
def test_a_file_that_is_cut_off_or_changed_is_passed_over_and_written_anew(tmp_path, keep: int):
    ends = kept_in(tmp_path)
    record(ends, 5)
    ends.close()
    file = tmp_path / ACKNOWLEDGED / "scorer.0"
    file.write_bytes(file.read_bytes()[:keep])
    assert read_acknowledged(tmp_path) == []
    record(kept_in(tmp_path), 6)
    assert sequences(tmp_path) == {"scorer": [(ROLLOUTS, 6)]}


def test_no_byte_that_changes_gives_another_sequence(tmp_path):
    ends = kept_in(tmp_path)
    record(ends, 5)
    file = tmp_path / ACKNOWLEDGED / "scorer.0"
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read_acknowledged(tmp_path) == []


def test_what_is_no_file_of_acknowledgements_is_passed_over(tmp_path):
    (tmp_path / ACKNOWLEDGED).mkdir()
    os.mkfifo(tmp_path / ACKNOWLEDGED / "pipe.0")
    (tmp_path / ACKNOWLEDGED / "folder.0").mkdir()
    (tmp_path / ACKNOWLEDGED / "text.0").write_text("x" * 5000)
    record(kept_in(tmp_path), 5)
    assert sequences(tmp_path) == {"scorer": [(ROLLOUTS, 5)]}
