"""A hostile producer with a connection of its own: whatever it stores, stages go on, say what was wrong, and where.

The bytes are written by hand, since no client would send them.
"""

import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest
from fuzz.examples import group
from stages import run_batcher, run_governor, run_normalizer, run_scorer

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.routing import LARGE_HEADER
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.runtime.service import open_service
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import LeaseReply, LeaseRequest
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.planning_header import PLAN_HEADER, Plan

pytestmark = pytest.mark.hostile

RUN = "r"
ROLLOUT = b"rl.rollout.r.sums"
CONFIG = RunConfig(
    run=RUN,
    environments={"sums": EnvironmentConfig(kind="sums.py:Sums", samples=2)},
    batching=BatchingConfig(batch_size=2, max_staleness=100),
)
STAGES = {"governor": run_governor, "normalizer": run_normalizer, "batcher": run_batcher, "scorer": run_scorer}


class Wire:
    """A connection to the server that sends what it is given, byte for byte."""

    def __init__(self, server: EmbeddedServer) -> None:
        host, _, port = server.url.rpartition("/")[2].rpartition(":")
        self._socket = socket.create_connection((host.rpartition("@")[2], int(port)), timeout=60)
        self._socket.recv(65536)
        options = {"verbose": False, "pedantic": False, "headers": True, "auth_token": server.token}
        self._socket.sendall(b"CONNECT " + json.dumps(options).encode() + b"\r\n")

    def publish(self, subject: bytes, headers: bytes | None, data: bytes) -> None:
        if headers is None:
            self._socket.sendall(b"PUB %b %d\r\n%b\r\n" % (subject, len(data), data))
        else:
            sizes = (subject, len(headers), len(headers) + len(data))
            self._socket.sendall(b"HPUB %b %d %d\r\n" % sizes + headers + data + b"\r\n")

    def close(self) -> None:
        """End the connection once the server has read everything."""
        self._socket.sendall(b"PING\r\n")
        while b"PONG" not in self._socket.recv(65536):
            pass
        self._socket.close()


def headers(**lines: str | bytes) -> bytes:
    parts = [
        name.replace("_", "-").encode() + b": " + (text.encode() if isinstance(text, str) else text)
        for name, text in lines.items()
    ]
    return b"NATS/1.0\r\n" + b"".join(part + b"\r\n" for part in parts) + b"\r\n"


def rollout(counter: int, **changes: object) -> tuple[bytes, bytes]:
    made = group(id=new_group_id(), counter=counter, policy_versions=["0-first-ab"], **changes)
    return headers(**{PLAN_HEADER: Plan.of(made).pack()}), encode(made)


def hostile() -> Sequence[tuple[bytes, bytes | None, bytes]]:
    """Return messages on subjects of the run, none of which is a rollout."""
    plan, data = rollout(1000)
    large = msgspec.msgpack.encode([[1, 1], 1 << 20, b""])
    return [
        (ROLLOUT, None, b""),
        (ROLLOUT, None, b"\xff" * 1000),
        (ROLLOUT, plan, data[:-1]),
        (ROLLOUT, plan, b"\x91" * 100_000),
        (ROLLOUT, plan, b"\xdd\xff\xff\xff\xff"),
        (ROLLOUT, headers(**{PLAN_HEADER: "1 x"}), data),
        (ROLLOUT, headers(**{PLAN_HEADER: b"\xff\xfe"}), data),
        (ROLLOUT, headers(**{PLAN_HEADER: "x" * (1 << 20)}), data),
        (ROLLOUT, headers(traceparent="00-" + "z" * 5000), data),
        (ROLLOUT, b"NATS/1.0\r\nno colon\r\n\r\n", data),
        (ROLLOUT, b"NATS/1.0\r\n: empty\r\n\r\n", data),
        (ROLLOUT, b"NATS/1.0 999 what\r\n\r\n", data),
        (ROLLOUT, b"\xff\xff\r\n\r\n", data),
        (ROLLOUT, headers(**{LARGE_HEADER: ">"}), large),
        (ROLLOUT, headers(**{LARGE_HEADER: "rl.blob.rollout.r.e." + "0" * 32}), large),
        (ROLLOUT, headers(**{LARGE_HEADER: "rl.blob.rollout.r.e." + "0" * 32}), msgspec.msgpack.encode([[-1], 1, b""])),
        (b"rl.rollout.r.\xff\xfe", None, b"x"),
        ("rl.rollout.r.\u00e9\u202e".encode(), plan, data),
        (b"rl.rollout.r." + b"e" * 2000, plan, data),
        (b"rl.rollout.r.$SYS", plan, data),
        (b"rl.rollout.r.a\x0b1", plan, data),
        (b"rl.rollout.r.\x0c\x1b[2J", plan, data),
        (b"rl.score.r.live.sums", None, b"\xc1"),
        (b"rl.score.r.live.sums", b"\xff\xff\r\n\r\n", b"\x80"),
        (b"rl.dead.r.live.sums", None, b"\x91" * 5000),
        (b"rl.teacher.r.live.\xff", None, b""),
        (b"rl.lease.r.sums", None, b"no request"),
        (b"rl.heartbeat.r.governor.x", None, b"\xff" * 100_000),
        (b"rl.heartbeat.r.\xff.x", b"\xff\r\n\r\n", b""),
        (b"rl.heartbeat.r.governor.\x0b7", None, b""),
        (b"$SRV.PING", None, b"\xff"),
    ]


@asynccontextmanager
async def all_stages(bus: NatsBus) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:

        async def run(name: str) -> None:
            async with open_service(bus, name, RUN) as service:
                await STAGES[name](service, CONFIG)

        for name in STAGES:
            tasks.start_soon(run, name)
        yield
        tasks.cancel_scope.cancel()


async def batched(bus: NatsBus) -> set[int]:
    async with bus.read(subjects.LEDGER, [subjects.ledger(RUN, "main")], follow=False) as entries:
        found = [decode(LedgerEntry, message.data) async for message in entries]
    return {ref.seq for entry in found if entry.batch for ref in entry.batch.groups}


async def test_stages_outlive_a_hostile_producer_and_tell_of_every_message(
    nats_bus: NatsBus, nats_server: EmbeddedServer
) -> None:
    wire = Wire(nats_server)
    good = []
    async with all_stages(nats_bus):
        for number, (subject, head, data) in enumerate(hostile()):
            wire.publish(subject, head, data)
            made = group(id=new_group_id(), counter=number, policy_versions=["0-first-ab"])
            plan = {PLAN_HEADER: Plan.of(made).pack()}
            ack = await nats_bus.publish(ROLLOUT.decode(), encode(made), msg_id=made.id, headers=plan)
            good.append(ack.seq)
        wire.close()
        with anyio.fail_after(120):
            while not set(good) <= await batched(nats_bus):  # noqa: ASYNC110 - the ledger is elsewhere
                await anyio.sleep(0.1)
            while len(await dead(nats_bus, "scorer")) < (await rollouts(nats_bus)) - len(good):  # noqa: ASYNC110
                await anyio.sleep(0.1)
        request = LeaseRequest(op="acquire", producer="p", env="sums", sequences=2, bytes=100)
        reply = await nats_bus.request(subjects.lease(RUN, request.env), encode(request), timeout_s=60.0)
        assert decode(LeaseReply, reply).reason != "", "the governor still answers"

    letters = await dead(nats_bus, "scorer")
    told = {letter.seq: letter for letter in letters}
    async with nats_bus.read(subjects.ROLLOUTS, [subjects.rollout(RUN)], headers_only=True, follow=False) as messages:
        stored = {message.seq: message.subject async for message in messages}
    assert told.keys() == stored.keys() - set(good)
    for seq, letter in told.items():
        assert (letter.stream, letter.kind, letter.env) == ("ROLLOUTS", "data", stored[seq].rpartition(".")[2])
        assert letter.reason
        assert letter.place.startswith("scorer ")
    assert sum("large message" in letter.reason for letter in letters) == 3  # why, not what its head looked like


async def dead(bus: NatsBus, stage: str) -> list[DeadLetter]:
    found = []
    async with bus.read(subjects.EVENTS, [subjects.event("dead", RUN, "live")], follow=False) as messages:
        async for message in messages:
            try:
                letter = decode(DeadLetter, message.data)
            except SchemaError:
                continue
            found += [letter] * (letter.stage == stage)
    return found


async def rollouts(bus: NatsBus) -> int:
    async with bus.read(subjects.ROLLOUTS, [subjects.rollout(RUN)], headers_only=True, follow=False) as messages:
        return len([message async for message in messages])
