"""When a connection leaves its server: the server is cut off and another is not. And when it comes back."""

import json
from types import SimpleNamespace
from urllib.parse import urlparse

import anyio
import anyio.lowlevel
import pytest

from lachesis.pipeline.bus import failover
from lachesis.pipeline.bus.config import ConnectionConfig
from lachesis.pipeline.bus.connection import _home
from lachesis.pipeline.bus.failover import LEAVE_AFTER_S, Failover
from lachesis.pipeline.bus.server_waits import ServerWaits

SERVED = {"cluster": {"leader": "b", "replicas": [{"active": 1_000_000_000}, {"active": 20_000_000_000}]}}
CUT_OFF = {"cluster": {"leader": "a", "replicas": [{"active": 5_000_000_000}, {"active": 5_000_000_000}]}}
NO_LEADER = {"error": {"code": 503, "err_code": 10008, "description": "temporarily unavailable"}}
NOT_FOUND = {"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}
ACCOUNT = {"memory": 0}

URLS = [urlparse(f"nats://u:p@h{number}:4222") for number in range(3)]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class FakeLink:
    """A connection to one server, which answers the same for ever; None: it is silent."""

    def __init__(self, number, stream, account=ACCOUNT):
        self.run = "r"
        self.clock = Clock()
        self.waits = ServerWaits(self.clock)
        self.nc = SimpleNamespace(servers=URLS, server_id=f"id{number}", move_to=self.move_to)
        self.server_name = f"h{number}:4222"
        self.answers = {"STREAM": stream, "INFO": account}
        self.optional = set()
        self.refused = set()
        self.is_refusing = False
        self.config = SimpleNamespace(url="nats://h0")
        self.explanations = {}
        self.last_error = None
        self.failure = None
        self.is_up = True
        self.moved = []
        self.stall = None
        self.looks = 0

    async def request_once(self, subject, data, *, timeout_s):
        self.looks += 1
        if self.is_refusing and subject in self.optional:
            self.refused.add(subject)
            return None
        answer = self.answers[subject.split(".")[2]]
        return None if answer is None else SimpleNamespace(data=json.dumps(answer).encode(), headers=None)

    async def move_to(self, server):
        self.moved.append(server.hostname)
        self.server_name = f"{server.hostname}:{server.port}"

    async def close(self):
        pass


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    for name in ("_PROBE_INTERVAL_S", "_ASK_INTERVAL_S", "_HOME_INTERVAL_S", "_NO_SERVER_PAUSE_S"):
        monkeypatch.setattr(failover, name, (0, 0))


async def watch(here, others, *, stalled_s, passing_s=0, home=None, looks=30):
    """Return where the connection went while its watch looked often enough."""
    asked = []

    async def dial(url):
        asked.append(url)
        return others.get(urlparse(url).hostname)

    wait = here.waits.begin("publish it", "lachesis_r_LEDGER")
    if stalled_s is None:
        here.waits.end(wait)
    else:
        here.clock.now += stalled_s
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Failover(here, dial, home).run)
            for turn in range(looks * 10):
                await anyio.lowlevel.checkpoint()
                here.clock.now += passing_s if turn == looks * 5 else 0
            here.stall = here.waits.stall
            tasks.cancel_scope.cancel()
    return here.moved, asked


@pytest.mark.parametrize("stream", [CUT_OFF, NO_LEADER, None])
async def test_a_server_that_is_cut_off_is_left(stream):
    here = FakeLink(0, stream, NO_LEADER)
    moved, asked = await watch(here, {"h1": FakeLink(1, NO_LEADER), "h2": FakeLink(2, SERVED)}, stalled_s=LEAVE_AFTER_S)
    assert set(moved) == {"h2"}
    assert all(url.startswith("nats://u:p@") for url in asked)


@pytest.mark.parametrize("stream", [SERVED, {"config": {}}])
async def test_a_server_that_answers_is_not_left(stream):
    """The disk may be full, or there is no cluster: moving cures neither."""
    here = FakeLink(0, stream)
    assert await watch(here, {"h2": FakeLink(2, SERVED)}, stalled_s=60) == ([], [])
    assert here.looks > 0


async def test_no_such_stream_is_no_reason_to_go():
    assert await watch(FakeLink(0, NOT_FOUND), {"h2": FakeLink(2, NOT_FOUND)}, stalled_s=60) == ([], [])


async def test_where_nobody_serves_nothing_moves():
    here = FakeLink(0, NO_LEADER, NO_LEADER)
    moved, asked = await watch(here, {"h1": None, "h2": FakeLink(2, CUT_OFF, NO_LEADER)}, stalled_s=60)
    assert moved == []
    assert len(asked) >= 2


async def test_a_short_wait_asks_nobody():
    here = FakeLink(0, NO_LEADER, NO_LEADER)
    assert await watch(here, {"h2": FakeLink(2, SERVED)}, stalled_s=LEAVE_AFTER_S - 0.1) == ([], [])


async def test_a_server_that_does_not_serve_is_left_by_those_who_wait_for_nothing():
    """A reader there hears nothing more, not even that."""
    here = FakeLink(0, CUT_OFF, NO_LEADER)
    passing = {"h1": None, "h2": FakeLink(2, SERVED)}
    assert (await watch(here, passing, stalled_s=None, passing_s=LEAVE_AFTER_S - 0.1))[0] == []
    assert "LEDGER has no leader" in here.stall.reason
    assert here.waits.stall is None, "nobody watches any more whether the server serves again"
    assert set((await watch(FakeLink(0, CUT_OFF), passing, stalled_s=None, passing_s=LEAVE_AFTER_S))[0]) == {"h2"}


async def test_what_the_server_refuses_to_be_asked_is_asked_once():
    here = FakeLink(0, SERVED)
    here.is_refusing = True
    assert await watch(here, {"h2": FakeLink(2, SERVED)}, stalled_s=60) == ([], [])
    assert here.refused == {"$JS.API.STREAM.INFO.lachesis_r_LEDGER"}
    here.answers["INFO"] = NO_LEADER
    moved, _ = await watch(here, {"h1": None, "h2": FakeLink(2, SERVED)}, stalled_s=60)
    assert set(moved) == {"h2"}


async def test_the_same_server_under_another_name_is_no_other():
    here = FakeLink(0, NO_LEADER, NO_LEADER)
    moved, _ = await watch(here, {"h1": FakeLink(0, SERVED), "h2": FakeLink(0, SERVED)}, stalled_s=60)
    assert moved == []


async def test_it_comes_back_once_its_own_server_serves_again():
    here = FakeLink(0, SERVED)
    home = FakeLink(1, NO_LEADER, NO_LEADER)
    assert (await watch(here, {"h1": home}, stalled_s=None, home=URLS[1]))[0] == []
    home.answers["STREAM"] = SERVED
    moved, asked = await watch(here, {"h1": home}, stalled_s=None, home=URLS[1])
    assert moved == ["h1"]
    assert len(asked) == 2  # looked twice, and is at home since


async def test_it_does_not_come_back_while_it_waits():
    here = FakeLink(0, SERVED)
    assert (await watch(here, {"h1": FakeLink(1, SERVED)}, stalled_s=60, home=URLS[1]))[0] == []


async def test_a_server_whose_address_names_no_port_is_its_own_server_too():
    """Else every process would dial its own server for ever, and leave it to come back to it."""
    home = _home(ConnectionConfig(url="u:p@h0, nats://u:p@h1"))
    assert home == URLS[0]
    assert await watch(FakeLink(0, SERVED), {"h0": FakeLink(0, SERVED)}, stalled_s=None, home=home) == ([], [])
