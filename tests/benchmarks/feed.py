"""Tokens a CPU second from the log into packed tensors: `python tests/benchmarks/feed.py --batches 20`.

One embedded server holds groups of 8 x `--tokens` tokens with some 29 KiB of text; a batch names `--groups` of them,
and passes over all but every `--every`-th. Printed is the processor time of this process, which only reads: raw is the
bare client's consumer, nothing decoded; fetched, the bus's own way to the groups of a batch, nothing decoded; decoded,
as far as the groups that a trainer gets; packed, with the tensors. Each runs `--rounds` times in turn; the median is
printed, with the machine's load. The digest is that of all tensors: two builds that feed alike have it alike.
"""

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable
from pathlib import Path

import anyio
import nats
import numpy as np
from nats.js.api import AckPolicy, ConsumerConfig
from speed.figures import Figure, write_figures
from speed.groups import VOCABULARY, make_group, make_words

from lachesis.pipeline.bus.config import ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.common.trainability import TrainerLimits
from lachesis.pipeline.ledger.reader import _fetch, fetch_groups
from lachesis.pipeline.trainer.packed_batch import PackedBatch, pack
from lachesis.pipeline.trainer.sequences import select_trainable
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.ledger import Batch, GroupRef
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import PackedGroup

RUN, ENV, SAMPLES = "bench", "env", 8


async def fill(bus: NatsBus, options: argparse.Namespace) -> list[Batch]:
    """Store the rollouts, and return the batches that name them."""
    draw = np.random.default_rng(0)
    words = make_words(draw)
    refs: list[GroupRef] = []
    for n in range(options.batches * options.groups * options.every):
        group = make_group(draw, words, n, samples=SAMPLES, tokens=options.tokens, run=RUN, env=ENV)
        headers = {PLAN_HEADER: Plan.of(group).pack()}
        ack = await bus.publish(subjects.rollout(RUN, ENV), encode(group), msg_id=group.id, headers=headers)
        advantages: list[float | None] = [float(value) for value in draw.normal(size=SAMPLES)]
        if n % options.every == 0:
            total = SAMPLES * options.tokens
            ref = GroupRef(
                group=group.id,
                seq=ack.seq,
                env=ENV,
                sequences=SAMPLES,
                tokens=total,
                policy_step=0,
                advantages=advantages,
            )
            refs.append(ref)
    parts = [refs[at : at + options.groups] for at in range(0, len(refs), options.groups)]
    return [
        Batch(number=n, groups=part, sequences=SAMPLES * len(part), tokens=SAMPLES * len(part) * options.tokens)
        for n, part in enumerate(parts)
    ]


async def raw(server: EmbeddedServer, count: int) -> None:
    """Read as many rollouts with the client library alone."""
    client = await nats.connect(server.url, token=server.token)
    try:
        stream = subjects.stream_name(RUN, subjects.ROLLOUTS)
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, filter_subject=subjects.rollout(RUN, ENV))
        pull = await client.jetstream().pull_subscribe(subjects.rollout(RUN, ENV), stream=stream, config=config)
        got = 0
        while got < count:
            got += len(await pull.fetch(min(64, count - got), timeout=5))
    finally:
        await client.close()


async def fetched(bus: NatsBus, batches: list[Batch]) -> None:
    for batch in batches:
        await _fetch(bus, subjects.ROLLOUTS, [ref.seq for ref in batch.groups], subjects.rollout(RUN))


async def decoded(bus: NatsBus, batches: list[Batch]) -> None:
    for batch in batches:
        await fetch_groups(bus, batch, PackedGroup)


async def packed(bus: NatsBus, batches: list[Batch]) -> AsyncGenerator[PackedBatch]:
    for batch in batches:
        groups, _ = await fetch_groups(bus, batch, PackedGroup)
        yield pack(select_trainable(groups, TrainerLimits("t", VOCABULARY)).sequences)


async def exhausted(batches: AsyncGenerator[PackedBatch]) -> None:
    async for _ in batches:
        pass


async def digest_of(batches: AsyncGenerator[PackedBatch]) -> str:
    digest = hashlib.sha256()
    async for batch in batches:
        for values in (batch.tokens_BT, batch.mask_BT, batch.logprobs_BT, batch.advantages_BT, batch.teacher_mask_BT):
            digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


async def timed(work: Awaitable[None]) -> float:
    before = time.process_time()
    await work
    return time.process_time() - before


async def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with (
            EmbeddedServer(Path(folder) / "nats", ServerConfig(max_file_bytes=8 << 30)) as server,
            await connect(server.url, run=RUN, name="bench", token=server.token) as bus,
        ):
            await bus.ensure_streams(StreamsConfig(rollouts_bytes=4 << 30))
            batches = await fill(bus, options)
            count = sum(len(batch.groups) for batch in batches)
            figures: dict[str, list[float]] = {name: [] for name in ("raw", "fetched", "decoded", "packed")}
            for _ in range(options.rounds):
                figures["raw"].append(await timed(raw(server, count)))
                figures["fetched"].append(await timed(fetched(bus, batches)))
                figures["decoded"].append(await timed(decoded(bus, batches)))
                figures["packed"].append(await timed(exhausted(packed(bus, batches))))
            found: list[Figure] = []
            for name, seconds_of in figures.items():
                seconds = statistics.median(seconds_of)
                rate = SAMPLES * options.tokens * count / seconds / 1e6
                print(f"{name:8} {1e6 * seconds / count:6.0f} us a group {rate:7.1f}M tokens a CPU second")
                found.append(Figure("feed", name, "M tokens a CPU second", rate))
            write_figures(options.json, found)
            digest = await digest_of(packed(bus, batches))
            print(f"digest {digest}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--groups", type=int, default=16, help="groups a batch")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--every", type=int, default=1, help="of so many rollouts one is in a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    anyio.run(main, parser.parse_args())
