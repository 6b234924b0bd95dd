"""States larger than a message on a real server, by a writer that is killed -9 while it writes them."""

import os
import random
import signal
import sys

import anyio
import msgspec
import pytest

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.runtime.state import StateStore
from lachesis.schemas import subjects

SUBJECT = subjects.state("r", "curriculum", "live", "sums")
SIZE = 17 << 20
"""Bytes: five parts, and twice what one message may hold."""
WRITER = f"""
import anyio, hashlib, sys
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.runtime.state import StateStore
from lachesis.schemas.control import StateSnapshot

async def main():
    async with await connect(sys.argv[1], run="r", name="writer", token=sys.argv[2]) as bus:
        store, found = await StateStore.open(bus, {SUBJECT!r}, "curriculum", sys.argv[3])
        index = 0 if found is None else found.index + 1
        print("ready", flush=True)
        while True:
            state = bytes([index % 251]) * {SIZE}
            event = StateSnapshot(stage="curriculum", index=index, covers=index + 1, cursors={{}}, state=state,
                                  sha256=hashlib.sha256(state).digest())
            await store.write(event)
            print(index, flush=True)
            index += 1

anyio.run(main)
"""


@pytest.fixture
async def bus(fresh_server, streams_config, anyio_backend):
    async with await connect(fresh_server.url, run="r", name="states", token=fresh_server.token) as connected:
        await connected.ensure_streams(msgspec.structs.replace(streams_config, ledger_bytes=768 << 20))
        yield connected


@pytest.mark.slow
async def test_a_writer_killed_between_parts_leaves_its_last_whole_state(bus, fresh_server):
    rng, cut, life = random.Random(1), 0, 0
    while life < 6 or (cut < 2 and life < 40):  # it may be between two states each time
        argv = [sys.executable, "-c", WRITER, fresh_server.url, fresh_server.token or "", f"{life}"]
        writer = await anyio.open_process(argv, stderr=None)
        told = b""
        while told.count(b"\n") < 2 + life % 2:
            told += await writer.stdout.receive()
        before = (await bus.usage(subjects.LEDGER)).last
        after = before + rng.randint(1, 5)
        async with bus.read(subjects.LEDGER, ["rl.state.>"], start=before + 1, headers_only=True) as messages:
            async for message in messages:
                if message.seq >= after:
                    break
        os.kill(writer.pid, signal.SIGKILL)
        await writer.wait()
        last = max(int(line) for line in told.split()[1:])
        _, found = await StateStore.open(bus, SUBJECT, "curriculum", "reader")
        assert found.index >= last
        assert found.state == bytes([found.index % 251]) * SIZE
        newest = await bus.get(subjects.LEDGER, (await bus.usage(subjects.LEDGER)).last)
        cut += newest.subject != SUBJECT
        await bus.trim(subjects.LEDGER, [subjects.state("r", "curriculum", "*", "*")], before=newest.seq)
        _, kept = await StateStore.open(bus, SUBJECT, "curriculum", "reader")
        assert kept == found
        life += 1
    assert cut > 1, "lives ended between parts"
    assert (await bus.usage(subjects.LEDGER)).bytes < 3 * SIZE
