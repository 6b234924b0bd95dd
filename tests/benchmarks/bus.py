"""Rates of the bus beside the bare client's, on one embedded server: `python tests/benchmarks/bus.py`.

The bare client publishes with `js.publish` from 64 tasks and reads with `fetch` and plain acknowledgements.
"""

import argparse
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import nats
from nats.errors import TimeoutError as NatsTimeoutError

from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.schemas import subjects
from lachesis.schemas.subjects import LEDGER, ROLLOUTS

SUBJECT = subjects.rollout("bench", "env")
TASKS = 64
SMALL = ("read headers", "commit of 1 KiB, in sequence")
WARM_UP = 1000


async def together(count: int, action: Callable[[int], Awaitable[object]]) -> float:
    """Run `action` for 0..count-1 from 64 tasks and return calls a second."""
    numbers = iter(range(count))

    async def worker() -> None:
        for i in numbers:
            await action(i)

    start = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(TASKS):
            tasks.start_soon(worker)
    return count / (time.perf_counter() - start)


async def consume(bus: NatsBus, count: int) -> float:
    start = time.perf_counter()
    async with bus.consume(ROLLOUTS, "bench", [SUBJECT], max_messages=512) as deliveries:
        for _ in range(count):
            await (await anext(deliveries)).ack()
    return count / (time.perf_counter() - start)


async def read(bus: NatsBus, count: int, *, headers_only: bool) -> float:
    start = time.perf_counter()
    async with bus.read(ROLLOUTS, [SUBJECT], headers_only=headers_only, follow=False) as reader:
        seen = [m.seq async for m in reader]
    assert len(seen) == count + 1
    return count / (time.perf_counter() - start)


async def fetch(bus: NatsBus, count: int) -> float:
    start = time.perf_counter()
    seen = [m.seq async for m in bus.fetch(ROLLOUTS, range(WARM_UP + count, WARM_UP + 2 * count))]
    assert len(seen) == count
    return count / (time.perf_counter() - start)


async def commit(bus: NatsBus, count: int) -> float:
    subject, expected = subjects.state("bench", "stage", "live", "env"), 0
    start = time.perf_counter()
    for i in range(count):
        expected = await bus.commit(subject, bytes(1024), expected=expected, msg_id=str(i))
    return count / (time.perf_counter() - start)


async def bare_fetch(js: nats.js.JetStreamContext, count: int) -> float:
    sub = await js.pull_subscribe(SUBJECT, durable="bare", stream=ROLLOUTS)
    start, left = time.perf_counter(), count
    while left:
        try:
            batch = await sub.fetch(min(64, left), timeout=5)
        except NatsTimeoutError:
            continue
        for msg in batch:
            await msg.ack()
        left -= len(batch)
    return count / (time.perf_counter() - start)


async def run(size: int, count: int, store: Path) -> dict[str, float]:
    async with EmbeddedServer(store) as server:
        client = await nats.connect(server.url, token=server.token)
        js = client.jetstream()
        async with await connect(server.url, name="bench", token=server.token) as bus:
            data, rates = bytes(size), {}
            await bus.ensure_streams(StreamsConfig())
            await together(WARM_UP, lambda i: js.publish(SUBJECT, data, headers={"Nats-Msg-Id": f"w{i}"}))  # warm up
            rates["bare publish"] = await together(
                count, lambda i: js.publish(SUBJECT, data, headers={"Nats-Msg-Id": f"b{i}"})
            )
            assert await bus.trim(ROLLOUTS, [SUBJECT], before=1 << 40) == WARM_UP + count - 1
            rates["publish"] = await together(count, lambda i: bus.publish(SUBJECT, data, msg_id=f"a{i}"))
            rates["consume, ack"] = await consume(bus, count)
            rates["bare fetch, ack"] = await bare_fetch(js, count)
            rates["read"] = await read(bus, count, headers_only=False)
            rates["read headers"] = await read(bus, count, headers_only=True)
            rates["fetch in order"] = await fetch(bus, count)
            rates["commit of 1 KiB, in sequence"] = await commit(bus, min(count, 5000))
            assert (await bus.usage(ROLLOUTS)).messages == count + 1
            assert (await bus.usage(LEDGER)).messages == min(count, 5000)
        await client.close()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="messages of 1 KiB; an eighth as many of 64 KiB")
    count = parser.parse_args().count
    for size, messages in ((1024, count), (65_536, count // 8)):
        with tempfile.TemporaryDirectory(prefix="lachesis bench ") as folder:
            rates = anyio.run(run, size, messages, Path(folder))
        print(f"{size // 1024} KiB, {messages} messages, {TASKS} tasks")
        for name, rate in rates.items():
            volume = "" if name in SMALL else f"{rate * size / (1 << 20):8,.1f} MiB/s"
            print(f"  {name:30s} {rate:10,.0f}/s {volume}")
        print(f"  publish / bare publish         {rates['publish'] / rates['bare publish']:10.2f}")
        print(f"  consume / bare fetch           {rates['consume, ack'] / rates['bare fetch, ack']:10.2f}")


if __name__ == "__main__":
    main()
