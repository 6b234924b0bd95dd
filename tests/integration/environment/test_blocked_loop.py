"""A service whose event loop a plain function holds goes on to speak, and keeps its leases, on a real server."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.common.code_place import StackLine
from lachesis.pipeline.environment.leases import ProducerLeases
from lachesis.pipeline.environment.plain_hooks import HOOKS
from lachesis.pipeline.runtime import blocked_loop
from lachesis.pipeline.runtime.blocked_loop import SPEAKS_AFTER_S, HeldLoop, speaking_while_held
from lachesis.pipeline.runtime.service import Service, open_service
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import Heartbeat, LeaseReply, LeaseRequest

RUN = "held"


class Peer:
    """Governor and listener in a thread: the loop of the test is held."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url, self.token = url, token
        self.ready, self.told, self.renewed, self.ended = (threading.Event() for _ in range(4))
        self.beats: list[Heartbeat] = []

    def run(self) -> None:
        asyncio.run(self._run())

    async def _answer(self, data: bytes) -> bytes:
        request = decode(LeaseRequest, data)
        if request.op == "renew":
            self.renewed.set()
        return encode(LeaseReply(granted=True, lease=request.lease or "one", expires_s=1.0))

    async def _run(self) -> None:
        async with (
            await connect(self.url, run=RUN, name="peer", token=self.token, needs_jetstream=False) as bus,
            bus.serve(subjects.lease(RUN, "sums"), self._answer),
            bus.listen(subjects.heartbeat(RUN, "*", "*")) as heard,
        ):
            self.ready.set()
            async for message in heard:
                beat = decode(Heartbeat, message.data)
                self.beats.append(beat)
                if any(one.key.startswith("held/") for one in beat.stage.notices):
                    self.told.set()
                if self.ended.is_set():
                    return


@contextmanager
def peer_of(server: EmbeddedServer) -> Iterator[Peer]:
    peer = Peer(server.url, server.token)
    thread = threading.Thread(target=peer.run, daemon=True)
    thread.start()
    try:
        assert peer.ready.wait(60)
        yield peer
    finally:
        peer.ended.set()


@pytest.mark.timeout(120)
async def test_a_held_service_is_named_and_keeps_its_leases(nats_server: EmbeddedServer) -> None:
    with peer_of(nats_server) as peer:
        async with (
            await connect(nats_server.url, run=RUN, name="env", token=nats_server.token) as bus,
            open_service(bus, "environment-sums", RUN) as service,
        ):
            leases = ProducerLeases(service, "p", "sums")
            assert await leases.acquire(4, 100) == "one"
            service.mark_ok()
            await service.heartbeat()
            service.leases.append(leases)
            service.loop_holders = HOOKS
            async with speaking_while_held(service):

                def reward() -> bool:
                    return peer.told.wait(60) and peer.renewed.wait(60)

                assert await HOOKS.call(reward), "it said nothing, or did not renew, while the loop was held"
            told = next(beat for beat in peer.beats if any(one.key.startswith("held/") for one in beat.stage.notices))
            assert told.instance == service.instance
            (notice,) = [one for one in told.stage.notices if one.key.startswith("held/")]
            assert "environment-sums is busy in function.reward for" in notice.what
            assert "async def" in notice.mend


@pytest.mark.timeout(120)
async def test_code_that_nothing_called_by_name_is_named_by_its_line(nats_server: EmbeddedServer) -> None:
    with peer_of(nats_server) as peer:
        async with (
            await connect(nats_server.url, run=RUN, name="env", token=nats_server.token) as bus,
            open_service(bus, "environment-sums", RUN) as service,
        ):
            service.mark_ok()
            await service.heartbeat()
            async with speaking_while_held(service):
                assert peer.told.wait(60), "it said nothing while the loop was held"  # as a rollout may
                problems = service.vitals.problems
                with anyio.fail_after(60):
                    while not any("test_code_that_nothing" in text for text in problems.values()):  # noqa: ASYNC110 - the loop's own
                        await anyio.sleep(0.05)
        told = next(beat for beat in peer.beats if any(one.key.startswith("held/") for one in beat.stage.notices))
        (notice,) = [one for one in told.stage.notices if one.key.startswith("held/")]
        assert "test_code_that_nothing_called_by_name_is_named_by_its_line (test_blocked_loop.py, line" in notice.what


def test_a_function_that_never_returns_is_not_spoken_for_any_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    bus: Any = SimpleNamespace(connection=(None, None))
    stage = SimpleNamespace(state="ok")
    service = SimpleNamespace(last_beat=SimpleNamespace(stage=stage), loop_holders=HOOKS, held_limit_s=600.0)
    speaker = blocked_loop._Speaker(cast("Service", service), bus)
    spoken_of = []
    for age_s in (0.0, SPEAKS_AFTER_S - 0.9, 100.0, 700.0):
        monkeypatch.setattr(HOOKS, "held", HeldLoop("Sums.reward", time.monotonic() - age_s))
        spoken_of.append(speaker._held() is not None)
    assert spoken_of == [False, False, True, False]
    stage.state = "starting"
    monkeypatch.setattr(HOOKS, "held", HeldLoop("Sums.reward", time.monotonic() - 100.0))
    assert speaker._held() is None, "a start says itself what it is busy with"


def test_a_loop_that_waits_or_that_a_stopped_process_had_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    bus: Any = SimpleNamespace(connection=(None, None))
    beat = SimpleNamespace(stage=SimpleNamespace(state="ok"))
    service = SimpleNamespace(last_beat=beat, loop_holders=None, held_limit_s=600.0)
    speaker = blocked_loop._Speaker(cast("Service", service), bus)
    waiting = [
        StackLine("/python/selectors.py", 1, "select"),
        StackLine("/python/asyncio/base_events.py", 2, "_run_once"),
    ]
    ours = [
        StackLine("/x/lachesis/pipeline/bus/jetstream.py", 1, "read"),
        StackLine("/x/lachesis/__main__.py", 6, "<module>"),
    ]
    own = [StackLine("/home/me/env.py", 1, "rollout"), *ours]
    for stack, age_s, is_held in (
        (waiting, 300.0, False),
        (ours, 3.0, False),
        (ours, 5.0, True),
        (own, 0.5, False),
        (own, 3.0, True),
    ):
        monkeypatch.setattr(blocked_loop, "stack_of", lambda _, stack=stack: stack)
        speaker._ticked_s = time.monotonic() - age_s
        assert (speaker._held() is not None) == is_held, (stack, age_s)
    speaker._resumed_s = time.monotonic()
    assert speaker._held() is None, "the process was stopped until now"
