"""A supervisor renews the leases of a process that can run nothing, and says at which line it stands."""

import os
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.environment.leases import ProducerLeases, leases_of
from lachesis.pipeline.notices.board import NoticeBoard
from lachesis.pipeline.notices.facts import ExpectedRun, Moment, ProcessFact
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import Heartbeat, LeaseReply, LeaseRequest, StageVitals
from lachesis.services.supervisor import blocked_processes
from lachesis.services.supervisor.blocked_processes import BlockedProcesses


class Governor:
    """Grants all, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, LeaseRequest]] = []

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        request = decode(LeaseRequest, data)
        self.requests.append((subject, request))
        return encode(LeaseReply(granted=True, lease=request.lease or f"lease-{len(self.requests)}", expires_s=20.0))


@pytest.fixture(autouse=True)
def _no_leases_of_earlier_tests() -> None:
    """Empty the notes of producers that the garbage collector has not come to."""
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and "memfd:lachesis-leases" in str(link.readlink()):
            os.truncate(int(link.name), 0)


async def test_leases_of_a_held_process_are_renewed_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    governor = Governor()
    bus = cast("Bus", governor)
    leases = ProducerLeases(Service(bus, "environment-sums", "r"), "p", "sums")
    one, two = await leases.acquire(4, 100), await leases.acquire(4, 100)
    assert one is not None
    leases.settled(one)
    assert [request.lease for request in leases_of(os.getpid())] == [two]
    governor.requests.clear()
    places: dict[int, str] = {os.getpid(): "reward (env.py, line 4)"}
    monkeypatch.setattr(blocked_processes, "held_place", places.get)
    processes = BlockedProcesses(bus, "r")
    async with anyio.create_task_group() as renewing:
        assert processes.check({os.getpid(): 1.0}, renewing) == {}, "it spoke a moment ago"
        assert processes.check({os.getpid(): 3.0, 1: 3.0}, renewing) == places
        assert processes.check({os.getpid(): 4.0}, renewing) == places, "not renewed again at once"
    assert [(subject, request.op, request.lease, request.sequences) for subject, request in governor.requests] == [
        ("rl.lease.r.sums", "renew", two, 4)
    ]


async def test_leases_of_all_producers_of_a_process_are_renewed() -> None:
    bus = cast("Bus", Governor())
    producers = [ProducerLeases(Service(bus, "gateway", "r"), "p", env) for env in ("sums", "words")]
    for leases in producers:
        await leases.acquire(4, 100)
    assert [request.env for request in leases_of(os.getpid())] == ["sums", "words"]


def test_a_held_process_is_named_after_seconds() -> None:
    board = NoticeBoard(ExpectedRun(), host="h")
    beat = Heartbeat(
        run="r",
        service="environment-sums",
        instance="i",
        pid=7,
        time_ns=0,
        host="h",
        schema_version=3,
        stage=StageVitals(state="ok"),
    )
    board.hear(beat, 100.0)
    fact: dict[str, Any] = {"name": "environment-sums", "services": ("environment-sums",), "pid": 7, "started_s": 0.0}
    board.see_processes([ProcessFact(**fact, state="R")])
    assert not board.notices(Moment(102.5, 0))
    board.see_processes([ProcessFact(**fact, state="R", held="reward (env.py, line 4)")])
    (notice,) = board.notices(Moment(102.6, 0))
    assert notice.what == "environment-sums is silent"
    assert notice.why.startswith("reward (env.py, line 4) holds Python itself")
    assert "to_process" in notice.mend
