"""Rates of the bus beside the bare client's, on one embedded server: `python tests/benchmarks/bus.py`.

The bare client publishes with `js.publish` from 64 tasks and reads with `fetch` and plain acknowledgements. With
`--cluster` the same again on three servers on this machine that keep three copies, and the ratio of the two.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import nats
from nats.errors import TimeoutError as NatsTimeoutError

sys.path.insert(0, str(Path(__file__).parents[1]))

from integration.cluster.nodes import TOKEN, Cluster, settled

from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.schemas import subjects
from lachesis.schemas.subjects import LEDGER, ROLLOUTS, STREAMS

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


@asynccontextmanager
async def servers(folder: Path, replicas: int) -> AsyncIterator[tuple[str, str]]:
    """Yield address and token of one embedded server, or of a cluster with a node for each copy."""
    if replicas == 1:
        async with EmbeddedServer(folder) as server:
            yield server.url, server.token
    else:
        with Cluster(folder, replicas) as cluster:
            yield cluster.url, TOKEN


async def run(size: int, count: int, folder: Path, replicas: int) -> dict[str, float]:
    async with (
        servers(folder, replicas) as (url, token),
        await connect(url, run="bench", name="bench", token=token) as bus,
    ):
        client = await nats.connect(url.split(","), token=token)
        js = client.jetstream()
        data, rates = bytes(size), {}
        await bus.ensure_streams(StreamsConfig(replicas=replicas))
        await settled(bus, STREAMS, replicas)
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
    parser.add_argument("--cluster", action="store_true", help="also on three servers with three copies")
    options = parser.parse_args()
    for size, messages in ((1024, options.count), (65_536, options.count // 8)):
        print(f"{size // 1024} KiB, {messages} messages, {TASKS} tasks")
        one = measured(size, messages, 1)
        if options.cluster:
            three = measured(size, messages, 3)
            for name, rate in three.items():
                print(f"  three copies / one, {name:30s} {rate / one[name]:10.2f}")


def measured(size: int, messages: int, replicas: int) -> dict[str, float]:
    """Run everything once, print and return the rates, messages a second."""
    with tempfile.TemporaryDirectory(prefix="lachesis bench ") as folder:
        rates = anyio.run(run, size, messages, Path(folder), replicas)
    print(f" {'one server' if replicas == 1 else f'{replicas} servers, {replicas} copies'}")
    for name, rate in rates.items():
        volume = "" if name in SMALL else f"{rate * size / (1 << 20):8,.1f} MiB/s"
        print(f"  {name:30s} {rate:10,.0f}/s {volume}")
    print(f"  publish / bare publish         {rates['publish'] / rates['bare publish']:10.2f}")
    print(f"  consume / bare fetch           {rates['consume, ack'] / rates['bare fetch, ack']:10.2f}")
    return rates


if __name__ == "__main__":
    main()
