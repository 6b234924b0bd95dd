"""Logs are bounded in bytes, of any writer, and what was written last stays."""

import os
import subprocess
import sys

import pytest

from lachesis.pipeline.bus.disk_room import StoreLogReader
from lachesis.services.supervisor import log_limit
from lachesis.services.supervisor.log_limit import LogLimit, cut_log, read_tail


def test_a_log_within_its_limit_is_left_alone_and_one_that_is_gone_harms_nothing(tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 1000)
    assert cut_log(log, 1000) == 0
    assert log.read_bytes() == b"x" * 1000
    assert cut_log(tmp_path / "none.log", 10) == 0


@pytest.mark.outside
def test_the_newest_lines_stay_beside_it_and_a_process_writes_on(tmp_path):
    log = tmp_path / "a.log"
    code = "import sys\nfor n in range(20000): print('line', n, flush=True)\nsys.stdin.read()\nprint('last')"
    with (
        log.open("ab") as sink,
        subprocess.Popen([sys.executable, "-c", code], stdout=sink, stdin=subprocess.PIPE) as child,
    ):
        assert child.stdin is not None
        while not log.read_bytes().endswith(b"line 19999\n"):
            os.sched_yield()
        assert cut_log(log, 10_000) > 200_000
        child.communicate()
    assert log.stat().st_size < 300, "a note, and what was written since"
    assert log.read_text().endswith("last\n")
    assert "services.log_bytes is 10000" in log.read_text()
    old = (tmp_path / "a.log.old").read_text().splitlines()
    assert old[-1] == "line 19999"
    assert old[0].startswith("line "), "no half line"
    assert sum(len(line) + 1 for line in old) <= 2500


@pytest.mark.parametrize("data", [b"x" * 5000, b"x" * 5000 + b"\n"], ids=["no line", "one line"])
def test_of_a_line_longer_than_what_is_kept_the_end_is_kept(tmp_path, data):
    log = tmp_path / "a.log"
    log.write_bytes(data)
    assert cut_log(log, 1000) == len(data)
    assert (tmp_path / "a.log.old").read_bytes() == data[-250:]


def test_a_full_disk_keeps_no_log_from_being_cut(tmp_path, monkeypatch):
    log = tmp_path / "a.log"
    log.write_bytes(b"x\n" * 1000)
    (tmp_path / "a.log.old.partial").mkdir()  # it cannot be written
    assert cut_log(log, 100) == 2000
    assert log.stat().st_size < 300


@pytest.mark.parametrize(("start", "expected"), [(0, "b\nc"), (2, "b\nc"), (4, "c"), (100, "b\nc")])
def test_the_tail_of_a_life_is_found_also_where_the_log_was_cut_since(tmp_path, start, expected):
    log = tmp_path / "a.log"
    log.write_bytes(b"a\nb\nc\n")
    assert read_tail(log, start, 2) == expected


def test_the_process_is_named_for_a_while(monkeypatch):
    limit = LogLimit(10, list)
    limit._record("environment-a", 100.0)
    (notice,) = limit.notices(100.0 + log_limit._SAID_S)
    assert (notice.source, notice.stops) == ("environment-a", False)
    assert "services.log_bytes = 10 " in notice.why
    assert limit.notices(100.1 + log_limit._SAID_S) == []


def test_a_reader_of_the_servers_log_goes_on_after_a_cut(tmp_path):
    log = tmp_path / "nats-server.log"
    log.write_bytes(b"line\n" * 100)
    reader = StoreLogReader(log)
    reader.read_on()
    assert cut_log(log, 100) == 500
    log.write_bytes(b"short\n")
    reader.read_on()
    assert reader._read == 6
