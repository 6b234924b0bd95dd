"""Rate of a replay beside the rate of reading the same history raw: `python tests/benchmarks/replay.py --groups 2000`.

One embedded server. The history is `--groups` groups of 8 x 256 tokens. Raw is the client library alone: a pull
consumer, fetches of 64 messages without acknowledgement, nothing decoded. Read is the bus's own reader, likewise
nothing decoded. The replay decodes and checks each group, texts included, rates it with three inline raters, normalizes
and commits it. `--raters figures` read no text, `--raters numeric` (the default) the length of one, so that what is
measured is the replay; `--raters text` split each completion twice, which is the raters' own cost. Each is run
`--rounds` times in turn, and the median is printed, with the processor time that a group took, here and in workers
(starting them included). All of it shares the machine's cores, the server included.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import NamedTuple

import anyio
import nats
import numpy as np
from nats.js.api import AckPolicy, ConsumerConfig
from speed.figures import Figure, write_figures

from lachesis.pipeline.bus.config import ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.offline.replay.pace import ReplayPace
from lachesis.pipeline.offline.replay.scoring import collect_seldom
from lachesis.pipeline.offline.replay.stage import ReplayRequest, run_replay
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.rater import Sample, rater
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.replay import Selection
from lachesis.schemas.rollout import Message, RolloutGroup, Sequences, VersionSpan

RUN, ENV = "bench", "env"
SAMPLES, TOKENS, PROMPT = 8, 256, 32
RATERS = {
    "figures": ("third", "stopped", "tokens"),
    "numeric": ("characters", "stopped", "tokens"),
    "text": ("words", "distinct", "tokens"),
}


def config_with(raters: str) -> RunConfig:
    return RunConfig(
        run=RUN,
        environments={ENV: EnvironmentConfig(kind="bench:None")},
        # by the name of this file, which is where workers find them
        scoring=ScoringConfig(raters=[RaterConfig(rater=f"replay:{name}") for name in RATERS[raters]]),
    )


@rater(bounds=(0.0, 1.0), inline=True)
def characters(sample: Sample) -> float:
    return min(1.0, len(sample.completion) / 4096)


@rater(bounds=(0.0, 1.0), inline=True)
def stopped(sample: Sample) -> float:
    return float(sample.finish_reason == "stop")


@rater(bounds=(0.0, 1.0), inline=True)
def third(sample: Sample) -> float:
    return sample.token_count % 3 / 2


@rater(bounds=(0.0, 1.0), inline=True)
def words(sample: Sample) -> float:
    return min(1.0, len(sample.completion.split()) / 512)


@rater(bounds=(0.0, 1.0), inline=True)
def distinct(sample: Sample) -> float:
    said = sample.completion.split()
    return len(set(said)) / max(len(said), 1)


@rater(bounds=(0.0, 1.0), inline=True)
def tokens(sample: Sample) -> float:
    return min(1.0, sample.token_count / 512)


def made(draw: np.random.Generator, n: int) -> RolloutGroup:
    """Return a group of random tokens with texts of about as many words as a tokenizer would make of them."""
    total = SAMPLES * TOKENS
    mask = [t % TOKENS >= PROMPT for t in range(total)]
    words = np.array(["the", "sum", "of", "seven", "and", "two", "is", "nine", "so", "answer"])
    said = [
        [
            Message(role="user", content="What is seven and two? Think, then answer."),
            Message(role="assistant", content=" ".join(draw.choice(words, (TOKENS - PROMPT) * 3 // 4))),
        ]
        for _ in range(SAMPLES)
    ]
    return RolloutGroup(
        id=new_group_id(), run=RUN, env=ENV, item=str(n), producer="bench", epoch=1, counter=n,
        policy_versions=["0-first-ab"], tokenizer_hash="t", started_ns=1, messages=said,
        sequences=Sequences(
            offsets=as_bytes(range(0, total + 1, TOKENS), "int32"),
            tokens=as_bytes(draw.integers(0, 32000, total), "int32"),
            loss_mask=pack_mask(mask),
            logprobs=as_bytes(np.where(mask, -draw.exponential(1.0, total), 0.0), "float32"),
            finish_reasons=["stop"] * SAMPLES,
            version_spans=[VersionSpan(i, 0, 0) for i in range(SAMPLES)],
        ),
    )  # fmt: skip


async def fill(bus: NatsBus, count: int) -> int:
    """Store the history and return its bytes."""
    draw = np.random.default_rng(0)
    subject = subjects.rollout(RUN, ENV)
    slots = anyio.Semaphore(64)

    async def store(group: RolloutGroup) -> None:
        async with slots:
            headers = {PLAN_HEADER: Plan.of(group).pack()}
            await bus.publish(subject, encode(group), msg_id=group.id, headers=headers)

    for first in range(0, count, 1000):
        async with anyio.create_task_group() as tasks:
            for n in range(first, min(count, first + 1000)):
                tasks.start_soon(store, made(draw, n))
    return (await bus.usage(subjects.ROLLOUTS)).bytes


async def raw(server: EmbeddedServer, count: int) -> float:
    """Read with the client library alone; return groups a second."""
    client = await nats.connect(server.url, token=server.token)
    try:
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, filter_subject=subjects.rollout(RUN, ENV))
        pull = await client.jetstream().pull_subscribe(
            subjects.rollout(RUN, ENV), stream=subjects.stream_name(RUN, subjects.ROLLOUTS), config=config
        )
        start, got = time.perf_counter(), 0
        while got < count:
            got += len(await pull.fetch(64, timeout=5))
        return count / (time.perf_counter() - start)
    finally:
        await client.close()


async def read(bus: NatsBus, count: int) -> float:
    start = time.perf_counter()
    async with bus.read(subjects.ROLLOUTS, [subjects.rollout(RUN, ENV)], follow=False) as messages:
        got = sum([1 async for _ in messages])
    assert got == count
    return count / (time.perf_counter() - start)


async def replay(bus: NatsBus, config: RunConfig, count: int, name: str, workers: int) -> float:
    request = ReplayRequest(revision=name, selection=Selection(envs=[ENV]), pace=ReplayPace(workers=workers))
    result = await run_replay(
        bus, config, request, draining=anyio.Event(), progress=lambda *_: None, connection=bus.connection
    )
    assert (result.groups, result.unscored, result.finished) == (count, 0, True)
    return count / result.seconds


class Timed(NamedTuple):
    """Groups a second, and milliseconds of processor time a group: of this process, and of its workers."""

    rate: float
    here: float
    workers: float


async def timed(work: Awaitable[float], count: int) -> Timed:
    before = os.times()
    rate = await work
    after = os.times()
    here = after.user + after.system - before.user - before.system
    workers = after.children_user + after.children_system - before.children_user - before.children_system
    return Timed(rate, 1e3 * here / count, 1e3 * workers / count)


async def main(options: argparse.Namespace) -> None:
    collect_seldom()  # as `lachesis replay` does
    config = config_with(options.raters)
    gib = 1 << 30
    streams = StreamsConfig(rollouts_bytes=8 * gib, replay_bytes=4 * gib)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            EmbeddedServer(Path(folder) / "nats", ServerConfig(max_file_bytes=32 * gib)) as server,
            await connect(server.url, run=RUN, name="bench", token=server.token) as bus,
        ):
            await bus.ensure_streams(streams)
            size = await fill(bus, options.groups)
            kib = size / options.groups / 1024
            what = f"{options.groups} groups of {SAMPLES} x {TOKENS} tokens, {kib:.1f} KiB each"
            print(f"{what}; {options.raters} raters; {os.cpu_count()} cores")
            replays = {f"replay, {n} workers" if n > 1 else "replay": n for n in options.workers}
            times: dict[str, list[Timed]] = {name: [] for name in ("raw", "read", *replays)}
            for number in range(options.rounds):
                times["raw"].append(await timed(raw(server, options.groups), options.groups))
                times["read"].append(await timed(read(bus, options.groups), options.groups))
                for name, n in replays.items():
                    work = replay(bus, config, options.groups, f"round-{number}-{n}", n)
                    times[name].append(await timed(work, options.groups))
            found: list[Figure] = []
            median = {name: statistics.median(one.rate for one in found) for name, found in times.items()}
            for name, runs in times.items():
                here, there = (statistics.median(column) for column in list(zip(*runs, strict=True))[1:])
                each = ", ".join(f"{one.rate:.0f}" for one in runs)
                found.append(Figure("replay", name, "groups/s", median[name]))
                found.append(Figure("replay", f"{name}, CPU a group", "ms", here + there))
                print(
                    f"{name:17} {median[name]:7.0f} groups/s (of {each}); processor time of a group: {here:.3f} ms"
                    + (f", and {there:.3f} ms of workers" if there >= 0.001 else "")
                )
            for name in replays:
                for other in ("raw", "read"):
                    print(f"{name} / {other}: {median[name] / median[other]:.3f}")
                    found.append(Figure("replay", f"{name} / {other}", "ratio", median[name] / median[other]))
            write_figures(options.json, found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--raters", choices=sorted(RATERS), default="numeric")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    anyio.run(main, parser.parse_args())
