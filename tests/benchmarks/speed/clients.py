"""The two ends of the measured pipeline, each a process of its own: `python -m speed.clients produce|consume`.

The producer publishes groups as an environment does: lease, encoding, publication. The consumer is a trainer that reads
`lachesis.batches` as packed tensors. It writes how many groups it has, and the producer reads that, so that in a phase
without a rate (`flat`) a bounded number of groups is under way. A phase begins once all groups of the one before have
arrived. The consumer writes into `--out`, for each phase, a snapshot of all processes before and after it, and the time
of each group from the begin of its encoding until its batch was packed.
"""

import argparse
import os
import sys
import time

import anyio
import msgspec
import numpy as np
from speed.figures import Snapshot
from speed.groups import make_group, make_words
from speed.processes import snapshot

import lachesis
from lachesis.pipeline.bus.config import ConnectionConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.environment.leases import ProducerLeases
from lachesis.pipeline.runtime.service import Service, open_service
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.planning_header import PLAN_HEADER, TRACEPARENT_HEADER, Plan, traceparent

__all__ = ["Phase", "PhaseResult"]

RUN = "bench"
_POOL = 16
"""Different groups that are published again and again under new ids."""
_UNDER_WAY = 256
"""Groups that may be published and not consumed in a phase without a rate."""
_PUBLISHERS = 16


class Phase(msgspec.Struct, frozen=True):
    """`groups` groups at `rate` a second. None: as fast as they go. 0: at half of the rate of the last such phase."""

    name: str
    groups: int
    rate: float | None = None


class PhaseResult(msgspec.Struct, frozen=True):
    """What the consumer saw of a phase: `latencies_s` by group, `youngest_s` of the last group of each batch."""

    phase: str
    before: Snapshot
    after: Snapshot
    latencies_s: list[float]
    youngest_s: list[float]


class _Progress:
    """Groups that the consumer has."""

    def __init__(self) -> None:
        self.consumed, self._changed = 0, anyio.Event()

    def set(self, consumed: int) -> None:
        self.consumed = consumed
        self._changed.set()
        self._changed = anyio.Event()

    async def reach(self, groups: int) -> None:
        while self.consumed < groups:
            await self._changed.wait()


class _Producer:
    def __init__(self, service: Service, options: argparse.Namespace) -> None:
        draw = np.random.default_rng(0)
        words = make_words(draw)
        self.service, self.envs = service, options.envs.split(",")
        self.pool = [
            make_group(draw, words, n, samples=options.samples, tokens=options.tokens, run=RUN, env=self.envs[0])
            for n in range(_POOL)
        ]
        self.size = 2 * max(len(encode(group)) for group in self.pool)
        self.leases = {env: ProducerLeases(service, f"bench-{env}", env) for env in self.envs}
        self.progress, self.published = _Progress(), 0

    async def hear(self) -> None:
        """Follow the consumer."""
        while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            self.progress.set(int(line))

    async def publish(self) -> None:
        number, self.published = self.published, self.published + 1
        env = self.envs[number % len(self.envs)]
        leases, made = self.leases[env], self.pool[number % _POOL]
        lease = await leases.acquire(len(made.sequences), self.size)
        assert lease is not None
        group = made.replace(id=new_group_id(), env=env, counter=number + 1, started_ns=time.time_ns())
        headers = {PLAN_HEADER: Plan.of(group).pack(), TRACEPARENT_HEADER: traceparent(group.id, sampled=False)}
        subject = subjects.rollout(RUN, env)
        await self.service.bus.publish_large(subject, encode(group), msg_id=group.id, headers=headers)
        leases.settled(lease)

    async def run(self, phases: list[Phase]) -> None:
        rate = 0.0
        for phase in phases:
            start_s, done = time.monotonic(), self.published + phase.groups
            if phase.rate is None:
                async with anyio.create_task_group() as tasks:
                    for _ in range(_PUBLISHERS):
                        tasks.start_soon(self._flood, done)
            else:
                await self._pace(phase.rate or rate / 2, done)
            await self.progress.reach(done)
            if phase.rate is None:
                rate = phase.groups / (time.monotonic() - start_s)

    async def _flood(self, done: int) -> None:
        while self.published < done:
            if self.published - self.progress.consumed >= _UNDER_WAY:
                await self.progress.reach(self.published - _UNDER_WAY + 1)
            else:
                await self.publish()

    async def _pace(self, rate: float, done: int) -> None:
        start_s, first = time.monotonic(), self.published
        async with anyio.create_task_group() as tasks:
            for number in range(done - first):
                await anyio.sleep(max(0.0, start_s + number / rate - time.monotonic()))
                tasks.start_soon(self.publish)


def _connection(options: argparse.Namespace) -> ConnectionConfig:
    return ConnectionConfig(url=options.url, token_file=options.token_file)


async def produce(options: argparse.Namespace) -> None:
    """Publish all phases. With `--wait N`: only wait for leases, with N tasks, until the process is ended."""
    config = _connection(options)
    async with (
        await connect(run=RUN, name="bench.environment", config=config) as bus,
        open_service(bus, "environment-bench", RUN) as service,
    ):
        producer = _Producer(service, options)
        leases = producer.leases[producer.envs[0]]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(producer.hear)
            for one in producer.leases.values():
                tasks.start_soon(one.renew)
            if options.wait:
                for _ in range(options.wait):
                    tasks.start_soon(leases.acquire, options.samples, producer.size)
                await anyio.sleep_forever()
            await producer.run(_phases(options))
            tasks.cancel_scope.cancel()


async def consume(options: argparse.Namespace) -> None:
    phases, results, out = _phases(options), list[PhaseResult](), anyio.Path(options.out)
    pids = {name: int(pid) for name, pid in (one.split("=") for one in options.pids.split(","))}
    pids["consumer"] = os.getpid()
    groups, ends = 0, np.cumsum([phase.groups for phase in phases]).tolist()
    latencies, youngest = list[float](), list[float]()
    before = snapshot(pids)
    async with lachesis.batches(RUN, nats=_connection(options)) as batches:
        print(0, flush=True)
        async for batch in batches:
            started = list(batch.fed.started_ns.values())
            rows = len(batch.packed.lengths_B)
            now_ns = time.time_ns()
            assert rows == options.samples * len(started), "rows are missing from the packed batch"
            latencies += [(now_ns - one) / 1e9 for one in started]
            youngest.append((now_ns - max(started)) / 1e9)
            groups += len(started)
            if groups == ends[len(results)]:
                after = snapshot(pids, groups)
                results.append(PhaseResult(phases[len(results)].name, before, after, latencies, youngest))
                latencies, youngest, before = [], [], after
                await out.write_bytes(msgspec.json.encode(results))
            try:
                print(groups, flush=True)
            except BrokenPipeError:  # the producer has published everything
                return
            if len(results) == len(phases):
                return


def _phases(options: argparse.Namespace) -> list[Phase]:
    return msgspec.json.decode(options.phases, type=list[Phase])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("end", choices=("produce", "consume"))
    parser.add_argument("--url")
    parser.add_argument("--token-file")
    parser.add_argument("--phases", default="[]")
    parser.add_argument("--envs", default="env")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--wait", type=int, default=0)
    parser.add_argument("--pids", default="")
    parser.add_argument("--out")
    options = parser.parse_args()
    anyio.run(produce if options.end == "produce" else consume, options)


if __name__ == "__main__":
    main()
