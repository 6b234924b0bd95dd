"""Time to list and find groups in a long history: `python tests/benchmarks/group_pages.py --groups 20000`.

A real server, with groups of 8 short samples, their scores and rewards 16 an event, 16 groups a batch and a report of
the trainer for 64 batches, as the stages store them. Printed are seconds for a page of 20 from the end, the middle and
the beginning, for the groups of a step, for one by its id, and for looking for a text that is nowhere, as far as the
page does; and the memory of this process afterwards.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from unit.conftest import Lab

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.config import ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit, GroupReward, GroupScore, RewardEvent, ScoreEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.ledger import GENESIS, Batch, GroupRef, LedgerEntry, StepTimes, TrainReport
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.services.observe.group_reader import newest_groups, read_group, read_group_page
from lachesis.services.observe.groups import GroupFilter, NumberRange

CONFIG = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="x")})
PER_EVENT = 16


async def fill(bus: NatsBus, groups: int) -> list[str]:
    """Store `groups` groups with what is derived of them, and return their ids, oldest first.

    No other process writes, so that sequences are known beforehand, and only one entry of the ledger in 64 is awaited:
    an acknowledgement of each message would take most of the time.
    """
    send = bus._link.nc.publish
    template = Lab(bus).group(0, samples=8, tokens=32)
    ids, previous = [], GENESIS
    scores = [float(i % 2) for i in range(8)]
    for first in range(0, groups, PER_EVENT):
        numbers = range(first, min(first + PER_EVENT, groups))
        made = [
            msgspec.structs.replace(
                template, id=f"{time.time_ns() // 1_000_000:012x}{n:020x}", item=f"item-{n}", counter=n
            )
            for n in numbers
        ]
        ids += [one.id for one in made]
        for group in made:
            await send(subjects.rollout("r", "sums"), encode(group), headers={PLAN_HEADER: Plan.of(group).pack()})
        about = [
            {"group": one.id, "seq": n + 1, "item": one.item, "policy_step": first // 64}
            for n, one in zip(numbers, made, strict=True)
        ]
        score = ScoreEvent(
            run="r", env="sums", revision="live", ensemble="e", raters={},
            groups=[GroupScore(**one, scores=scores, ratings={"a": scores}, lengths=[31] * 8) for one in about],
        )  # fmt: skip
        reward = RewardEvent(
            run="r", env="sums", revision="live", advantage="grpo",
            commit=Commit(term="t", index=first, cursors={}, delta=b"", crc32=0),
            groups=[
                GroupReward(**one, verdict="trainable", scores=scores, rewards=scores, advantages=scores, snapshot="s",
                            mean=0.5, std=0.5, range=1.0, n_valid=8) for one in about
            ],
        )  # fmt: skip
        await send(subjects.event("score", "r", "live", "sums"), encode(score))
        await send(subjects.event("reward", "r", "live", "sums"), encode(reward))
        refs = [
            GroupRef(group=one["group"], seq=one["seq"], env="sums", sequences=8, tokens=256, policy_step=0,
                     advantages=list(scores)) for one in about
        ]  # fmt: skip
        number = first // PER_EVENT
        entry = LedgerEntry(
            run="r", trainer="main", index=number, previous=previous, watermark=numbers[-1] + 1, resolved=b"",
            events_cursor=1, batch=Batch(number=number, groups=refs, sequences=128, tokens=4096),
            next_batch=number + 1, written_ns=time.time_ns(),
        )  # fmt: skip
        previous = entry.digest()
        if number % 64:
            await send(subjects.ledger("r", "main"), encode(entry))
        else:
            await bus.publish(subjects.ledger("r", "main"), encode(entry), msg_id=f"{number}")
            report = TrainReport(
                run="r", trainer="main", lineage="l", term="t", step=number + 1, ledger_index=number, chain=previous,
                next_batch=number + 1, policy_version=f"{number + 1}-l-abc", checkpoint="c",
                steps=[StepTimes(n, 1, time.time_ns()) for n in range(max(0, number - 63), number + 1)],
            )  # fmt: skip
            subject = subjects.state("r", "trainer", subjects.LIVE, "main")
            await bus.publish(subject, encode(report), msg_id=f"report {number}")
            await stored(bus, len(ids))
    await stored(bus, groups)
    return ids


async def stored(bus: NatsBus, groups: int) -> None:
    while (await bus.usage(subjects.ROLLOUTS)).last < groups:  # noqa: ASYNC110 - until they are
        await anyio.sleep(0.01)


async def page(bus: Bus, wanted: GroupFilter = GroupFilter(), before: int | None = None) -> None:  # noqa: B008
    found = 0
    async with aclosing(newest_groups(bus, CONFIG, wanted, before=before)) as rows:
        async for _ in rows:
            found += 1
            if found == 20:
                return


async def search(bus: Bus, text: str) -> None:
    """Look for a text as the page does, which answers with what it found by then."""
    last = (await bus.usage(subjects.ROLLOUTS)).last
    found = await read_group_page(bus, CONFIG, GroupFilter(text=text), limit=20, seconds=5.0)
    print(f"  looked through {last + 1 - (found.before or 1)} of {last}")


async def timed(what: str, work: Callable[[], Awaitable[Any]]) -> None:
    began = time.perf_counter()
    await work()
    print(f"{what:32} {time.perf_counter() - began:6.2f} s", flush=True)


async def main(groups: int) -> None:
    budget = StreamsConfig(rollouts_bytes=8 << 30, events_bytes=4 << 30, ledger_bytes=2 << 30)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            EmbeddedServer(Path(folder), ServerConfig(max_file_bytes=24 << 30)) as server,
            await connect(server.url, run="r", name="benchmark", token=server.token) as bus,
        ):
            await bus.ensure_streams(budget)
            began = time.perf_counter()
            ids = await fill(bus, groups)
            print(f"{groups} groups stored in {time.perf_counter() - began:.0f} s")
            last = (await bus.usage(subjects.ROLLOUTS)).last
            await timed("newest page", lambda: page(bus))
            await timed("page in the middle", lambda: page(bus, before=last // 2))
            await timed("oldest page", lambda: page(bus, before=21))
            middle = float(groups // PER_EVENT // 2)
            await timed(
                "groups of a step, in the middle", lambda: page(bus, GroupFilter(step=NumberRange(middle, middle)))
            )
            await timed("one by its id, in the middle", lambda: read_group(bus, CONFIG, ids[groups // 2]))
            await timed("one by its id, the newest", lambda: read_group(bus, CONFIG, ids[-1]))
            await timed("a text that is nowhere, for 5 s", lambda: search(bus, "nowhere"))
            print(f"{psutil.Process().memory_info().rss / 1e6:.0f} MB resident")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=20_000)
    anyio.run(main, parser.parse_args().groups)
