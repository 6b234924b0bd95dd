"""The disk under a server: from which room on it is warned of, and which of its streams take no message any more."""

from pathlib import Path

import pytest

from lachesis.pipeline.bus.disk_room import (
    KEEP_FREE_BYTES,
    RESTART_BYTES,
    StoreLogReader,
    assess,
    failed_streams,
    stored_bytes,
)
from lachesis.pipeline.common.disk import DiskRoom

GIB = 1 << 30
STORE = Path("/runs/a/nats")
# as nats-server 2.15.1 writes them
FAILED = """\
[1] 2026/11/22 23:46:58.794671 [ERR] Filestore [ROLLOUTS] Critical write error: write /x/1.blk: no space left on device
[1] 2026/11/22 23:46:58.794779 [ERR] JetStream failed to store a msg on stream '$G > EVENTS': write /x/1.blk: no space
[1] 2026/11/22 23:46:58.794783 [ERR] JetStream stream '$G > KV_a' critical write error: write /x/1.blk: no space
"""
FINE = "[1] 2026/11/22 23:46:58.377340 [INF]   Max Memory:      64.00 MB\n[1] 2026/11/22 [INF] Server is ready\n"


def level(free: int, *, stored: int = 0, budget: int = 14 * GIB, failed: set[str] | None = None) -> str:
    return assess(STORE, DiskRoom(free, 100 * GIB), stored, budget, failed or set()).level


def test_it_is_warned_of_before_the_disk_is_full_relative_to_what_may_still_be_stored() -> None:
    assert level(2 * GIB) == "ok"
    assert level(GIB) == "low"
    assert level(GIB, stored=8 * GIB) == "ok"  # six more to come
    assert level(KEEP_FREE_BYTES, budget=GIB) == "low"
    assert level(KEEP_FREE_BYTES - 1) == "closed"
    assert level(RESTART_BYTES - 1) == "full"


@pytest.mark.parametrize("budget", [GIB >> 10, 64 << 20, 14 * GIB])
def test_what_cannot_be_filled_is_not_warned_of(budget: int) -> None:
    assert level(max(budget + 1, KEEP_FREE_BYTES), budget=budget) == "ok"
    assert level(0, stored=budget, budget=budget) == "ok"


def test_a_full_disk_is_named_with_what_is_missing() -> None:
    text = str(assess(STORE, DiskRoom(1000, GIB), 0, 14 * GIB).text)
    assert str(STORE) in text
    assert f"at least {KEEP_FREE_BYTES - 1000:,} more needed" in text


def test_streams_that_failed_are_named_with_room_and_without() -> None:
    failed = {"ROLLOUTS", "EVENTS"}
    assert level(GIB, failed=failed) == level(0, failed=failed) == "failed"
    without = str(assess(STORE, DiskRoom(0, GIB), 0, GIB, failed).text)
    assert "is full" in without
    assert without.endswith("EVENTS, ROLLOUTS")
    assert "is full" not in str(assess(STORE, DiskRoom(GIB, GIB), 0, GIB, failed).text)


def test_a_group_is_not_admitted_into_the_room_that_a_restart_needs() -> None:
    assert KEEP_FREE_BYTES > RESTART_BYTES


def test_the_servers_log_names_the_streams_that_failed() -> None:
    assert failed_streams((FINE + FAILED).splitlines()) == {"ROLLOUTS", "EVENTS", "KV_a"}
    assert failed_streams(FINE.splitlines()) == set()


def test_a_log_is_read_on_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = StoreLogReader(path)
    log.read_on()  # there is none yet
    path.write_text(FINE + FAILED[:70])
    log.read_on()
    assert log.failed == set()
    path.write_text(FINE + FAILED)
    log.read_on()
    assert log.failed == {"ROLLOUTS", "EVENTS", "KV_a"}


def test_what_a_store_holds_is_the_sum_of_its_files(tmp_path: Path) -> None:
    assert stored_bytes(tmp_path / "none") == 0
    (tmp_path / "jetstream").mkdir()
    before = stored_bytes(tmp_path)
    (tmp_path / "jetstream" / "1.blk").write_bytes(bytes(1000))
    assert stored_bytes(tmp_path) >= before + 1000
