"""A whole secured run under messages that its weakest keys can send: it trains on, and says what it did not answer."""

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest
from fuzz.examples import EXAMPLES, group
from integration.harness import CONFIG, RUN, SUMS, Run
from integration.security.secured import Secured, auth_init
from nats.aio.client import Client

from lachesis.pipeline.access import OBSERVER
from lachesis.pipeline.bus.routing import LARGE_HEADER
from lachesis.pipeline.health.ledger_reader import LedgerReader
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.control import Heartbeat, LeaseRequest
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.services.registry import services

STEPS = 60
LEASE, ROLLOUT = subjects.lease(RUN, "sums"), f"rl.rollout.{RUN}.sums"
REPLIES = [
    "rl.any.thing", f"rl.ledger.{RUN}.main", f"rl.reward.{RUN}.live.sums",
    f"$JS.API.STREAM.PURGE.lachesis_{RUN}_LEDGER",
    f"$JS.API.STREAM.DELETE.lachesis_{RUN}_LEDGER", f"$KV.lachesis_{RUN}.policy", "_INBOX", "_INBOX_governor.a.1",
    "_INBOX_trainer.of.another", "_INBOX_batcher.>", "_INBOX_observer.*", "_INBOX_environment-sums." + "x" * 3800,
    "_INBOX_environment-sums.\x0b\x0c", "_INBOX_environment-sums.\x1b]0;x\x07", "_INBOX_environment-sums.\u202e",
    "\x0b", ">", "*.*",
    ".", "$SYS.REQ.SERVER.PING", "_R_.a", "$GR.a", f"$JS.ACK.lachesis_{RUN}_ROLLOUTS.scorer.1.1.1.1.0",
]  # fmt: skip
JUNK = [b"", b"x", b"\xc1", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"\x1b[2J" * 100, b"\xff" * 100_000]
REQUEST = LeaseRequest(op="acquire", producer="p", env="sums", sequences=2, bytes=100)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
async def secured_run(tmp_path: Path) -> AsyncIterator[tuple[Run, Secured]]:
    folder = tmp_path / "server"
    folder.mkdir()
    auth_init(folder, "--run", RUN, config=CONFIG.format(sums=SUMS, steps=STEPS))
    async with Secured(folder, RUN, tls=False) as server:
        (tmp_path / "run").mkdir()
        run = Run(tmp_path / "run", STEPS, server)
        run.start()
        yield run, server


def leases() -> list[bytes]:
    """Requests for leases, from malformed ones to greedy ones."""
    greedy = [
        msgspec.structs.replace(REQUEST, **changes)
        for changes in (
            {"sequences": 1 << 62}, {"sequences": -1}, {"sequences": 0}, {"bytes": 1 << 62}, {"bytes": -1},
            {"env": "\x1b[2J"},
            {"env": "unknown"}, {"producer": "\r\nNats-Service-Error: x"}, {"producer": "x" * 100_000}, {"op": "renew"},
            {"op": "release"}, {"op": "renew", "lease": "\x1b"}, {"op": "release", "lease": "x" * 100_000},
        )
    ]  # fmt: skip
    return [*JUNK, *map(encode, greedy)]


def heartbeats() -> list[tuple[str, bytes]]:
    """Heartbeats in the name of other services, on the attacker's own subject."""
    example = next(one for one in EXAMPLES if isinstance(one, Heartbeat))
    forged = [
        msgspec.structs.replace(example, run=RUN, service=name, instance=f"forged-{name}", metrics={"train/step": 1e9})
        for name in (*services(), "\x1b[2J", "../x")
    ]
    return [(f"rl.heartbeat.{RUN}.environment-sums.{i}", data) for i, data in enumerate([*map(encode, forged), *JUNK])]


def rollouts() -> list[tuple[str, dict[str, str], bytes]]:
    made = group(id=new_group_id(), run=RUN, env="sums", counter=1 << 40)
    plan, data = {PLAN_HEADER: Plan.of(made).pack()}, encode(made)
    large = msgspec.msgpack.encode([[1, 1], 1 << 20, b""])
    headers = [
        {}, {PLAN_HEADER: "x" * 100_000}, {"Nats-Rollup": "sub"}, {"Nats-Rollup": "all"}, {"Nats-TTL": "1s"},
        {"Nats-Expected-Last-Sequence": "0"}, {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1"}, {LARGE_HEADER: ">"},
        {"Nats-Trace-Dest": f"rl.ledger.{RUN}.main"}, {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": ROLLOUT},
        {"Nats-Marker-Reason": "Purge"}, {"KV-Operation": "PURGE"},
        {"Status": "409", "Description": "Consumer Deleted"},
        {"Nats-Pending-Messages": "x"}, {"traceparent": "00-" + "z" * 5000}, {"Nats-Msg-Id": ""},
    ]  # fmt: skip
    names = [f"rl.rollout.{RUN}.{env}" for env in ("\x0b", "\x1b[2J", "\u202e", "e" * 2000, "$SYS", "_INBOX")]
    return [
        *((ROLLOUT, {**plan, **head}, data) for head in headers),
        *((ROLLOUT, plan, junk) for junk in JUNK),
        *((name, plan, data) for name in names),
        (ROLLOUT, {LARGE_HEADER: f"rl.blob.rollout.{RUN}.{'0' * 32}"}, large),
        (ROLLOUT, {LARGE_HEADER: f"rl.blob.rollout.{RUN}.sums.{'0' * 32}"}, large),
        (f"rl.blob.rollout.{RUN}.sums.\x0b", {"Nats-Rollup": "sub"}, b"x"),
    ]


async def attack(environment: Client, observer: Client) -> int:
    """Send everything, and return how much it was."""
    sent = 0

    async def send(
        client: Client, subject: str, reply: str, data: bytes, headers: dict[str, str] | None = None
    ) -> None:
        nonlocal sent
        sent += 1
        await client._send_publish(subject, reply, data, len(data), headers)

    for reply in REPLIES:
        await send(environment, LEASE, reply, encode(REQUEST))
        for verb in ("PING", "INFO", "STATS"):
            await send(observer, f"$SRV.{verb}", reply, b"\xff")
        for service in ("governor", "trainer", "supervisor"):
            await send(observer, subjects.health(RUN, service), reply, b"")
    for data in leases():
        await send(environment, LEASE, environment.new_inbox(), data)
        await send(observer, "$SRV.PING", observer.new_inbox(), data)
    for subject, data in heartbeats():
        await send(environment, subject, "rl.any.thing", data)
    for subject, headers, data in rollouts():
        await send(environment, subject, "", data, headers)
    for verb in ("PING", "INFO", "STATS"):
        large = {"x": "y" * (observer.max_payload - 200)}
        await send(observer, f"$SRV.{verb}", observer.new_inbox(), b"", large)
        await send(
            observer,
            f"$SRV.{verb}",
            observer.new_inbox(),
            b"",
            {"a": "b\udcff".encode("utf-8", "replace").decode()},
        )
    for raw in (
        b"NATS/1.0\r\nno colon\r\n\r\n",
        b"\xff\xff\r\n\r\n",
        b"NATS/1.0 999 what\r\n\r\n",
        b"NATS/1.0\r\n: x\r\n\r\n",
    ):
        sent += 1
        await observer._send_command(b"HPUB $SRV.PING _INBOX_observer.a.b %d %d\r\n%b\r\n" % (len(raw), len(raw), raw))
    await environment.flush(60)
    await observer.flush(60)
    return sent


async def status(run: Run) -> dict[str, object]:
    done = await anyio.run_process(
        [sys.executable, "-m", "lachesis", "status", "--json", *run.arguments], env=run.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


async def test_a_run_outlives_all_that_its_weakest_keys_can_send(secured_run: tuple[Run, Secured]) -> None:
    run, server = secured_run
    with run:
        await run.wait_for_step(1, 300)
        before = run.pids()
        async with server.client("environment-sums") as environment, server.client(OBSERVER) as observer:
            assert await attack(environment, observer) > 250
        shown = await status(run)
        trainer = next(row for row in shown["services"] if row["service"] == "trainer")
        governor = next(row for row in shown["services"] if row["service"] == "governor")
        assert not any("forged" in instance for row in shown["services"] for instance in row["instances"])
        assert trainer["metrics"].get("train/step", 0) < 1e6
        assert governor["metrics"]["bus/unanswered_requests"] == 0, "the server keeps answers in their askers' accounts"
        step = run.step()
        await run.wait_for_step(step + 2, 300)
        assert {name: pid for name, pid in run.pids().items() if name in before} == before, "nothing was restarted"
        assert await run.wait(600) == 0, run.tail()
    async with server.during("audit") as bus:
        reader = LedgerReader(bus, RUN, "main")
        assert not [problem.text for problem in await reader.verify_new_entries() if problem.breaks]
        assert reader.entries
    log = b"".join(file.read_bytes() for file in (run.folder / "logs").iterdir())
    assert b"Traceback" not in log
    assert b"lost the connection" not in log
    assert log.replace(b"\n", b"").decode().isprintable()
