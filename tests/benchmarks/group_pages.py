"""Time to list and find groups in a long history: `python tests/benchmarks/group_pages.py --groups 20000`.

A real server, with groups of 8 short samples, their scores and rewards 16 an event, and 16 groups a batch, stored as
the stages store them. Told are seconds for a page of 20 from the end, the middle and the beginning, for finding one by
its id, and for looking through all for a text that is nowhere; and the memory of this process afterwards.
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
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from unit.conftest import Lab

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.config import ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit, GroupReward, GroupScore, RewardEvent, ScoreEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.ledger import GENESIS, Batch, GroupRef, LedgerEntry
from lachesis.schemas.plan import PLAN_HEADER, Plan
from lachesis.services.observe.group_reader import newest_groups, read_group
from lachesis.services.observe.groups import GroupFilter

CONFIG = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="x")})
PER_EVENT = 16


async def fill(bus: Any, groups: int) -> list[str]:
    """Store `groups` groups with what is derived of them, and return their ids, oldest first."""
    lab, ids, previous, at = Lab(bus), [], GENESIS, 0
    scores = [float(i % 2) for i in range(8)]
    for first in range(0, groups, PER_EVENT):
        made = [
            lab.group(n, samples=8, tokens=32, id=f"{time.time_ns() // 1_000_000:012x}{n:020x}")
            for n in range(first, min(first + PER_EVENT, groups))
        ]
        seqs: dict[str, int] = {}

        async def store(group: Any, seqs: dict[str, int] = seqs) -> None:
            headers = {PLAN_HEADER: Plan.of(group).pack()}
            ack = await bus.publish(subjects.rollout("r", "sums"), encode(group), msg_id=group.id, headers=headers)
            seqs[group.id] = ack.seq

        async with anyio.create_task_group() as tasks:
            for group in made:
                tasks.start_soon(store, group)
        ids += sorted(seqs, key=seqs.__getitem__)
        about = [{"group": one.id, "seq": seqs[one.id], "item": one.item, "policy_step": first // 64} for one in made]
        score = ScoreEvent(
            run="r", env="sums", revision="live", ensemble="e", raters={},
            groups=[GroupScore(**one, scores=scores, ratings={"a": scores}, lengths=[31] * 8) for one in about],
        )  # fmt: skip
        reward = RewardEvent(
            run="r", env="sums", revision="live", advantage="grpo",
            commit=Commit(term="t", index=first, cursors={}, delta=b""),
            groups=[
                GroupReward(**one, verdict="trainable", scores=scores, rewards=scores, advantages=scores, snapshot="s",
                            mean=0.5, std=0.5, range=1.0, n_valid=8) for one in about
            ],
        )  # fmt: skip
        for kind, event in (("score", score), ("reward", reward)):
            subject = subjects.event(kind, "r", "live", "sums")  # type: ignore[arg-type]
            await bus.publish(subject, encode(event), msg_id=f"{kind}{first}")
        refs = [
            GroupRef(group=one.id, seq=seqs[one.id], env="sums", sequences=8, tokens=256, policy_step=0,
                     advantages=list(scores)) for one in made
        ]  # fmt: skip
        number = first // PER_EVENT
        entry = LedgerEntry(
            run="r", trainer="main", index=number, previous=previous, watermark=max(seqs.values()), resolved=b"",
            events_cursor=1, batch=Batch(number=number, groups=refs, sequences=128, tokens=4096),
            next_batch=number + 1, written_ns=time.time_ns(),
        )  # fmt: skip
        at = await bus.commit(subjects.ledger("r", "main"), encode(entry), expected=at, msg_id=f"{number}")
        previous = entry.digest()
    return ids


async def page(bus: Bus, wanted: GroupFilter = GroupFilter(), before: int | None = None) -> None:  # noqa: B008
    found = 0
    async with aclosing(newest_groups(bus, CONFIG, wanted, before=before)) as rows:
        async for _ in rows:
            found += 1
            if found == 20:
                return


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
            await timed("one by its id, in the middle", lambda: read_group(bus, CONFIG, ids[groups // 2]))
            await timed("one by its id, the newest", lambda: read_group(bus, CONFIG, ids[-1]))
            await timed("a text that is nowhere", lambda: page(bus, GroupFilter(text="nowhere")))
            print(f"{psutil.Process().memory_info().rss / 1e6:.0f} MB resident")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=20_000)
    anyio.run(main, parser.parse_args().groups)
