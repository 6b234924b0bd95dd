"""Names of replicas: given numbers count, all others have their host's name, in a container or not."""

import logging
import multiprocessing
import re
import socket
import uuid
from multiprocessing.connection import Connection

import pytest

from lachesis.services.process.replica import claim_replica, replica_name

pytestmark = pytest.mark.outside


@pytest.fixture
def run() -> str:
    """A run that no other test has: names are claimed for the whole machine."""
    return f"r{uuid.uuid4().hex}"


@pytest.mark.parametrize(
    ("number", "host", "name"),
    [
        (3, "scorer-7d9f8-x2", "3"),
        (None, "scorer-7d9f8-x2.example", "scorer-7d9f8-x2-example"),
        (None, "gpu_07", "gpu_07"),
        (None, "h" * 80, "h" * 64),
    ],
)
def test_by_hand(number: int | None, host: str, name: str) -> None:
    assert replica_name(number, host) == name


def test_processes_on_two_machines_never_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for host in ("one", "two"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        names.add(replica_name(None))
    assert names == {"one", "two"}
    monkeypatch.undo()
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", replica_name(None))


def test_processes_on_one_machine_never_share_a_name_and_a_free_one_is_taken_again(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-1")
    with claim_replica(run, "scorer", None) as first:
        with claim_replica(run, "scorer", None) as second, claim_replica(run, "scorer", None) as third:
            assert (first, second, third) == ("gpu-1", "gpu-1-2", "gpu-1-3")
        with claim_replica(run, "scorer", None) as again:
            assert again == "gpu-1-2"
        with claim_replica(run, "teacher", None) as other, claim_replica(f"{run}-b", "scorer", None) as elsewhere:
            assert other == elsewhere == "gpu-1", "other services and runs have names of their own"


def test_a_long_host_name_leaves_room_for_the_number(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 80)
    with claim_replica(run, "scorer", None), claim_replica(run, "scorer", None) as second:
        assert second == "h" * 62 + "-2"


def _hold(run: str, report: Connection) -> None:
    with claim_replica(run, "scorer", None) as name:
        report.send(name)
        report.recv()


def test_the_name_of_a_killed_process_is_free(run: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_hold, args=(run, theirs), daemon=True)
    process.start()
    held = ours.recv()
    with claim_replica(run, "scorer", None) as name:
        assert name == f"{held}-2"
    process.kill()
    process.join()
    with claim_replica(run, "scorer", None) as name:
        assert name == held


def test_a_number_that_another_process_here_has_is_kept_and_logged(run: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lachesis")
    with claim_replica(run, "scorer", 3):
        assert not caplog.messages
        with claim_replica(run, "scorer", 3, supervised=True) as name:
            assert name == "3"
        assert not caplog.messages, "a supervisor's predecessor may be about to end"
        with claim_replica(run, "scorer", 3) as name:
            assert name == "3"
    assert [f"another scorer of run {run} on this machine is replica 3 as well" in one for one in caplog.messages] == [
        True
    ]
