"""The epoch order under kill -9: environments, curriculum, governor, trainer and broker die in the middle of a run.

No item is left out of an epoch, and none has two groups in it that count.
"""

import os
import signal
from collections import Counter, defaultdict
from contextlib import aclosing
from pathlib import Path

import pytest
from integration.audit import audit
from integration.harness import RUN, Run
from integration.servers import Supervised

from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import follow_ledger
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import EpochRecord
from lachesis.schemas.rollout import RolloutGroup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SETS = {
    "curriculum.strategy": "epoch",
    "services.environments": 2,
    "environments.sums.params.largest": 5,
    "evaluation.sums.params.largest": 5,
}
VICTIMS = ["environment-sums-1", "environment-sums-2", "curriculum", "environment-sums-1", "governor", "trainer"]


async def test_every_item_has_one_group_an_epoch_that_counts(tmp_path: Path) -> None:
    run = Run(tmp_path, 1_000_000, Supervised(tmp_path), sets=SETS)
    with run:
        run.start()
        await run.wait_for_step(2)
        for name in [*VICTIMS, *run.servers.pids(), *VICTIMS[:2]]:
            pid, before = run.pids()[name], run.step()
            os.kill(pid, signal.SIGKILL)
            await run.wait_until_back(name, pid)
            await run.wait_for_step(before + 6)
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    items: dict[tuple[int, int], int] = {}
    outcomes: dict[int, str] = {}
    async with run.servers.afterwards("epoch") as bus:
        async with bus.read(subjects.ROLLOUTS, [subjects.rollout(RUN, "sums")], follow=False) as messages:
            async for message in messages:
                group = decode(RolloutGroup, message.data)
                assert group.dispatch is not None
                place = group.epoch, group.counter
                places[place].append(message.seq)
                assert items.setdefault(place, group.dispatch.index) == group.dispatch.index
        async with aclosing(follow_ledger(bus, RUN, "main", LedgerPosition(), follow=False)) as entries:
            async for entry in entries:
                outcomes |= {one.seq: one.kind for one in entry.outcomes}
                if entry.batch is not None:
                    assert not {ref.seq for ref in entry.batch.groups} & outcomes.keys()
                    outcomes |= {ref.seq: "batched" for ref in entry.batch.groups}
        stored = await bus.value(keys.epoch("sums"))
        found = await audit(bus, RUN)
    assert found.violations == []
    assert stored is not None
    record = decode(EpochRecord, stored.value)
    open_places = {claim.key for claim in record.claims}
    size = int(record.order.partition("-")[0])
    whole = {(epoch, place) for epoch in range(record.epoch) for place in range(size)}
    assert record.epoch >= 2
    assert whole - open_places <= places.keys()
    for epoch in range(record.epoch):
        shown = [items[key] for key in sorted(whole & items.keys()) if key[0] == epoch]
        assert len(shown) == len(set(shown)), "every item has one place"
    for place, seqs in places.items():
        counted = [seq for seq in seqs if outcomes.get(seq) not in (None, "duplicate")]
        assert len(counted) <= 1, f"{place}: {counted}"
    again = Counter(len(seqs) for seqs in places.values())
    print(f"{record.epoch} epochs of {size}; places by stored groups: {dict(again)}; still claimed: {len(open_places)}")
