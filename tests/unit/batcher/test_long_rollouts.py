"""Which groups are starved: governor and batcher are real, generation and steps are played, time is simulated."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.batcher.entry_former import EntryFormer
from lachesis.pipeline.batcher.join import Joiner
from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.governor.logic import Governor
from lachesis.pipeline.ledger.chain import Chain
from lachesis.pipeline.retention.budget import MEASURED_STREAMS
from lachesis.schemas.annotations import GroupReward
from lachesis.schemas.control import LeaseRequest
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.planning_header import Plan

SAMPLES, STEP_S = 4, 0.1
GROUPS, SETTLED = 1200, 800
"""Groups that are begun, and those of them whose ends are counted: each has one by then."""


class World:
    """A run in which group i takes `seconds[i]`, and `samples[i]` of its samples do not fail.

    `ends`: what became of each group, by its place in the order of starts. `sizes`: samples of each batch.
    """

    def __init__(
        self, batching: BatchingConfig, seconds: Sequence[float], samples: Sequence[int] = (SAMPLES,) * GROUPS
    ) -> None:
        self.seconds, self.samples = seconds, samples
        self.governor = Governor(FlowConfig(lease_s=1e6), batching, term="t")
        room = StreamUsage(first=1, last=0, messages=0, bytes=0, max_bytes=1 << 40)
        self.governor.usage(dict.fromkeys(MEASURED_STREAMS, room), 1e9)
        self.joiner = Joiner(batching)
        self.former = EntryFormer(batching, self.joiner, Chain("r", "main", "t"))
        self.ends: dict[int, str] = {}
        self.sizes: list[int] = []
        self.worst = 0
        self._number_of: dict[int, int] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._now_s = 0.0
        self._begun = self._step = self._untrained = self._order = 0

    def run(self) -> None:
        self._begin()
        while self._due:
            self._now_s, _, act = heapq.heappop(self._due)
            act()
            self._begin()
            self.worst = max(self.worst, self.governor.outstanding)
        assert self.worst <= self.governor.capacity, "the governor's bound holds"
        assert set(range(SETTLED)) <= self.ends.keys()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._due, (self._now_s + seconds, self._order, act))

    def _begin(self) -> None:
        request = LeaseRequest(op="acquire", producer="p", env="e", sequences=SAMPLES, bytes=1)
        while self._begun < GROUPS and (reply := self.governor.answer_request(request, self._now_s)).granted:
            self._after(self.seconds[self._begun], partial(self._end, self._begun, self._step, reply.lease))
            self._begun += 1

    def _end(self, number: int, first: int, lease: str | None) -> None:
        samples = self.samples[number]
        seq = self.joiner.frontier + 1
        self._number_of[seq] = number
        plan = Plan(
            group=new_group_id(), sequences=samples, samples=samples, tokens=40, policy_step=first, producer="p",
            epoch=1, counter=number, started_ns=1, lease=lease,
            newest_step=self._step if self._step > first else None,
        )  # fmt: skip
        self.governor.member(seq, "e", plan, self._now_s)
        self.joiner.member(seq, "e", plan, 0, 0)
        reward = GroupReward(
            group=plan.group, seq=seq, item="i", policy_step=first, verdict="trainable", scores=[1.0] * samples,
            rewards=[1.0] * samples, advantages=[1.0] * samples, snapshot="s", mean=0.5, std=0.5, range=1.0,
            n_valid=samples,
        )  # fmt: skip
        self.joiner.reward(seq, 0, reward)
        while (groups := self.former.choose()) or self.joiner.unrecorded_outcomes:
            entry = self.former.write(self.former.next_entry_content(groups or [], 1e-3), written_ns=0)
            self.governor.entry(entry)
            for outcome in entry.outcomes:
                self._settle(outcome.seq, outcome.kind)
            if entry.batch is not None:
                self.sizes.append(entry.batch.sequences)
                for ref in entry.batch.groups:
                    self._settle(ref.seq, "batched")
                self._untrained += 1
                if self._untrained == 1:
                    self._after(STEP_S, self._trained)

    def _settle(self, seq: int, kind: str) -> None:
        number = self._number_of[seq]
        assert number not in self.ends, "one outcome"
        self.ends[number] = kind

    def _trained(self) -> None:
        self._step, self._untrained = self._step + 1, self._untrained - 1
        self.governor.trained(self._step)
        if self._untrained:
            self._after(STEP_S, self._trained)


LONG_EVERY = 10
LASTS_S = [20.0 if number % LONG_EVERY == 0 else 1.0 for number in range(GROUPS)]
"""Each tenth task takes twenty times as long as the others, and new weights arrive while it runs."""


def long_share(world: World) -> float:
    """Return the share of long groups in what was trained."""
    trained = [number for number in range(SETTLED) if world.ends[number] == "batched"]
    return sum(number % LONG_EVERY == 0 for number in trained) / len(trained)


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 8])
def test_groups_that_take_twenty_times_as_long_have_their_share_of_what_is_trained(max_staleness: int) -> None:
    world = World(BatchingConfig(batch_size=16, max_staleness=max_staleness), LASTS_S)
    world.run()
    assert long_share(world) == pytest.approx(1 / LONG_EVERY, rel=0.1)


def test_counted_from_the_oldest_policy_all_of_them_are_dropped() -> None:
    world = World(BatchingConfig(batch_size=16, max_staleness=2, staleness_of="oldest"), LASTS_S)
    world.run()
    assert long_share(world) < 0.1 / LONG_EVERY
    assert Counter(world.ends[number] for number in range(SETTLED))["stale"] >= 0.9 * SETTLED / LONG_EVERY


@pytest.mark.parametrize("rate", [0.002, 0.01, 0.05])
def test_a_group_is_trained_though_some_of_its_samples_failed_and_batches_stay_full_within_a_group(rate: float) -> None:
    rng = random.Random(0)
    samples = [max(1, SAMPLES - sum(rng.random() < rate for _ in range(SAMPLES))) for _ in range(GROUPS)]
    world = World(BatchingConfig(batch_size=16, max_staleness=2), [rng.uniform(0.5, 2) for _ in range(GROUPS)], samples)
    world.run()
    assert set(world.ends.values()) == {"batched"}
    assert all(16 - SAMPLES < size <= 16 for size in world.sizes)
    failed = sum(SAMPLES - of for of in samples)
    assert sum(16 - size for size in world.sizes) <= failed, "no more is missing than failed"
