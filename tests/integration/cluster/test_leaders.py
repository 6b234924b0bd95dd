"""Nodes of a cluster are killed, stopped and frozen under load: nothing acknowledged is lost or comes twice.

Prints how long each kind of work stood still, by what was done to which node.
"""

import os
import random
import signal
from collections import defaultdict
from pathlib import Path
from statistics import median

import anyio
import msgspec
import pytest
from integration.bus.test_restart import STATE, Load
from integration.cluster.nodes import Cluster, leader_of, settled

from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.schemas import subjects
from lachesis.schemas.subjects import LEDGER, ROLLOUTS, STREAMS

ALL = subjects.rollout("run")
ROUNDS = int(os.environ.get("LEADER_ROUNDS", "1"))
"""How often each is struck in each way: the more, the more its figures say."""
HOW = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    # the client drops, unclosed, a connection that a frozen server took in and never answered
    pytest.mark.filterwarnings("ignore:.*StreamWriter.__del__:pytest.PytestUnraisableExceptionWarning"),
]


class Gaps:
    """The longest time that each kind of work stood still since `begin`, seconds."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.longest: dict[str, float] = {}

    def begin(self) -> None:
        self.longest = dict.fromkeys(self._load.counts(), 0.0)

    async def watch(self) -> None:
        """Look every 10 ms, for ever."""
        counts, since = self._load.counts(), dict.fromkeys(self._load.counts(), anyio.current_time())
        while True:
            await anyio.sleep(0.01)
            now, new = anyio.current_time(), self._load.counts()
            for kind in new:
                if new[kind] != counts[kind]:
                    since[kind] = now
                elif kind in self.longest:
                    self.longest[kind] = max(self.longest[kind], now - since[kind])
            counts = new


async def test_leaders_are_struck_under_load(tmp_path: Path, streams_config: StreamsConfig) -> None:
    rng = random.Random(3)
    load = Load()
    gaps = Gaps(load)
    ends = [(how, which) for how in HOW for which in (ROLLOUTS, LEDGER, None)] * ROUNDS
    found: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    with Cluster(tmp_path / "three nodes") as cluster:
        async with (
            await cluster.connect("producer", "run") as producer,
            await cluster.connect("consumer", "run") as consumer,
            await cluster.connect("other", "run") as other,
        ):
            await producer.ensure_streams(msgspec.structs.replace(streams_config, replicas=3, rollouts_bytes=2 << 30))
            async with anyio.create_task_group() as readers:
                readers.start_soon(gaps.watch)
                readers.start_soon(load.consume, consumer)
                readers.start_soon(load.consume, other)
                readers.start_soon(load.follow, other)
                async with anyio.create_task_group() as writers:
                    for i in range(4):
                        writers.start_soon(load.publish, producer, f"p{i}")
                    writers.start_soon(load.commit, producer)
                    for how, stream in ends:
                        await settled(producer, STREAMS)
                        await goes_on(load)
                        node = await leader_of(producer, stream) if stream else rng.choice(cluster.names)
                        gaps.begin()
                        await cluster.strike(node, how)
                        await goes_on(load)
                        found[f"{how.name} of {f'the leader of {stream}' if stream else 'any node'}"].append(
                            gaps.longest
                        )
                        cluster.mend(node)
                    load.stop = True
                await load.catch_up()
                readers.cancel_scope.cancel()
            async with producer.read(ROLLOUTS, [ALL], follow=False) as reader:
                stored = [(m.seq, m.headers["Nats-Msg-Id"]) async for m in reader]
            async with producer.read(LEDGER, [STATE], follow=False) as reader:
                commits = [(m.seq, m.headers["Nats-Msg-Id"]) async for m in reader]
    assert sorted(stored) == sorted((seq, msg_id) for msg_id, seq in load.acked.items())  # none lost, none twice
    assert load.read == stored  # in order, without a gap or a repeat
    assert set(load.consumed) == set(load.acked)
    assert commits == load.committed
    for name, rows in found.items():
        gaps_s = {kind: [row[kind] for row in rows] for kind in rows[0]}
        text = ", ".join(f"{kind} {median(values):.2f}/{max(values):.2f}" for kind, values in gaps_s.items())
        print(f"{name}: stood still, median/most of {len(rows)}, s: {text}")
    print(f"{len(load.acked)} published, {len(load.committed)} committed, {load.consumed.total()} deliveries")


async def goes_on(load: Load) -> None:
    """Wait until every kind of work has made progress, twice, so that all of it is past the loss."""
    for _ in range(2):
        await load.grow()
