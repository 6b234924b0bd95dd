from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lachesis.pipeline.batching.config import BatchingConfig
from lachesis.pipeline.batching.marks import Resolved
from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.flow.config import FlowConfig
from lachesis.pipeline.flow.logic import Governor
from lachesis.schemas.control import LeaseReply, LeaseRequest
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import Batch, GroupRef, LedgerEntry
from lachesis.schemas.plan import Plan
from lachesis.schemas.subjects import EVENTS, ROLLOUTS, TEACHER

BATCHING = BatchingConfig(batch_size=8, max_staleness=2)
FLOW = FlowConfig(lease_s=10.0, reserved_share=0.5)


def governor(**changes: float) -> Governor:
    return Governor(FLOW, BATCHING, term="t", grants_from_s=changes.get("grants_from_s", 0.0))


def acquire(env: str = "a", sequences: int = 4, size: int = 1000) -> LeaseRequest:
    return LeaseRequest(op="acquire", producer="p", env=env, sequences=sequences, bytes=size)


def plan(sequences: int = 4, lease: str | None = None) -> Plan:
    return Plan(
        group=new_group_id(),
        sequences=sequences,
        samples=sequences,
        tokens=100,
        policy_step=0,
        producer="p",
        epoch=1,
        counter=0,
        started_ns=1,
        lease=lease,
    )


def entry(resolved: Resolved, next_batch: int, batch: Batch | None = None) -> LedgerEntry:
    return LedgerEntry(
        run="r",
        trainer="t",
        index=0,
        previous="0",
        watermark=resolved.watermark,
        resolved=resolved.pack(),
        events_cursor=0,
        batch=batch,
        next_batch=next_batch,
    )


def batch(number: int, sequences: int) -> Batch:
    ref = GroupRef(group="g", seq=1, env="a", sequences=sequences, tokens=1, policy_step=0, advantages=[0.0])
    return Batch(number=number, groups=[ref], sequences=sequences, tokens=1)


def test_grants_up_to_the_capacity_and_says_why_it_stops() -> None:
    it = governor()
    assert it.capacity == 24
    assert all(it.ask(acquire(), 0.0).granted for _ in range(6))
    refused = it.ask(acquire(), 0.0)
    assert not refused.granted
    assert "24 of 24 sequences are outstanding" in str(refused.reason)
    assert refused.retry_s == FLOW.retry_s


def test_a_group_larger_than_the_capacity_is_told_so() -> None:
    assert "can never be admitted" in str(governor().ask(acquire(sequences=25), 0.0).reason)


def test_a_stored_rollout_takes_the_place_of_its_lease() -> None:
    it = governor()
    lease = it.ask(acquire(), 0.0).lease
    it.member(1, "a", plan(lease=lease))
    assert (it.leased, it.accepted, it.outstanding) == (0, 4, 4)


def test_a_rollout_whose_lease_ran_out_still_counts() -> None:
    it = governor()
    lease = it.ask(acquire(), 0.0).lease
    it.expire(11.0)
    assert it.outstanding == 0
    it.member(1, "a", plan(lease=lease))
    assert it.outstanding == 4


def test_capacity_returns_when_the_batch_is_trained_and_at_once_when_a_group_is_dropped() -> None:
    it = governor()
    for seq in (1, 2, 3):
        it.member(seq, "a", plan())
    it.entry(entry(Resolved(2), 1, batch(0, 8)))
    assert (it.accepted, it.untrained, it.outstanding) == (4, 8, 12)
    it.trained(1)
    assert it.outstanding == 4
    it.entry(entry(Resolved(3), 1))  # the third had no variance, say
    assert it.outstanding == 0


def test_a_rollout_read_after_its_outcome_counts_nothing() -> None:
    it = governor()
    it.entry(entry(Resolved(5), 1, batch(0, 8)))
    it.trained(1)
    it.member(3, "a", plan())
    assert it.outstanding == 0


def test_after_a_restart_batches_never_seen_count_in_full() -> None:
    it = governor()
    it.entry(entry(Resolved(5), 7))
    it.trained(5)
    assert it.untrained == 16


def test_grants_nothing_before_earlier_leases_have_run_out() -> None:
    it = governor(grants_from_s=100.0)
    reply = it.ask(acquire(), 95.0)
    assert not reply.granted
    assert reply.retry_s == 5.0
    assert it.ask(acquire(), 100.0).granted


def test_a_renewed_lease_lives_on_and_an_ended_one_cannot_be_renewed() -> None:
    it = governor()
    lease = it.ask(acquire(), 0.0).lease
    renew = LeaseRequest(op="renew", producer="p", env="a", lease=lease)
    assert it.ask(renew, 9.0).granted
    it.expire(15.0)
    assert it.leased == 4
    assert not it.ask(renew, 19.5).granted


def test_a_released_lease_frees_its_share() -> None:
    it = governor()
    lease = it.ask(acquire(), 0.0).lease
    assert it.ask(LeaseRequest(op="release", producer="p", env="a", lease=lease), 1.0).granted
    assert it.outstanding == 0


def test_a_fast_environment_leaves_the_slow_ones_their_minimum() -> None:
    it = governor()
    slow = [f"slow{i}" for i in range(5)]
    for env in slow:  # they asked before and hold nothing now
        lease = it.ask(acquire(env), 0.0).lease
        it.ask(LeaseRequest(op="release", producer="p", env=env, lease=lease), 0.0)
    while it.ask(acquire("fast"), 1.0).granted:
        pass
    assert it.outstanding < it.capacity
    assert "reserved" in str(it.ask(acquire("fast"), 1.0).reason)
    assert all(it.ask(acquire(env, sequences=2), 1.0).granted for env in slow)


def test_an_environment_alone_may_use_everything() -> None:
    it = governor()
    granted = 0
    while it.ask(acquire("only"), 0.0).granted:
        granted += 4
    assert granted == it.capacity


def test_a_nearly_full_stream_closes_admission_before_it_is_full() -> None:
    it = governor()
    it.usage({ROLLOUTS: StreamUsage(1, 10, 10, 700, 1000), EVENTS: usage(0), TEACHER: usage(0)})
    assert it.ask(acquire(size=90), 0.0).granted
    reply = it.ask(acquire(size=90), 0.0)
    assert not reply.granted
    assert "ROLLOUTS holds 700 bytes" in str(reply.reason)


def test_annotations_still_to_come_are_reserved_too() -> None:
    it = governor()
    per_group = FLOW.event_bytes_per_group + 4 * FLOW.event_bytes_per_sequence
    it.usage({EVENTS: StreamUsage(1, 1, 1, 0, int(per_group * 2.5))})
    it.member(1, "a", plan())
    assert it.ask(acquire(), 0.0).granted
    assert "EVENTS" in str(it.ask(acquire(), 0.0).reason)


def usage(held: int) -> StreamUsage:
    return StreamUsage(1, 1, 1, held, 1 << 40)


class Bound(RuleBasedStateMachine):
    """Whatever the order of requests, rollouts, outcomes, steps and time, the bound holds and capacity returns."""

    def __init__(self) -> None:
        super().__init__()
        self.it = governor()
        self.now = 0.0
        self.seq = 0
        self.leases: list[tuple[str, int]] = []
        self.open: dict[int, int] = {}
        self.resolved = Resolved()
        self.batches = 0
        self.trained = 0

    @rule(env=st.sampled_from("abc"), sequences=st.integers(1, 9))
    def ask(self, env: str, sequences: int) -> None:
        reply: LeaseReply = self.it.ask(acquire(env, sequences), self.now)
        if reply.granted and reply.lease:
            self.leases.append((reply.lease, sequences))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        lease, sequences = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.seq += 1
        self.it.member(self.seq, "a", plan(sequences, lease))
        self.open[self.seq] = sequences

    @precondition(lambda self: self.open)
    @rule(data=st.data(), batched=st.booleans())
    def resolve(self, data: st.DataObject, batched: bool) -> None:
        seq = data.draw(st.sampled_from(sorted(self.open)))
        sequences = self.open.pop(seq)
        self.resolved.add(seq)
        made = None
        if batched:
            made = batch(self.batches, sequences)
            self.batches += 1
        self.it.entry(entry(self.resolved, self.batches, made))

    @precondition(lambda self: self.trained < self.batches)
    @rule()
    def train(self) -> None:
        self.trained += 1
        self.it.trained(self.trained)

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for lease, _ in self.leases:  # a live producer renews
            assert self.it.ask(LeaseRequest(op="renew", producer="p", env="a", lease=lease), self.now).granted

    @invariant()
    def bounded(self) -> None:
        assert self.it.outstanding <= self.it.capacity
        assert self.it.leased == sum(sequences for _, sequences in self.leases)

    def teardown(self) -> None:
        for lease, _ in self.leases:
            self.it.ask(LeaseRequest(op="release", producer="p", env="a", lease=lease), self.now)
        self.it.entry(entry(Resolved(self.seq), self.batches))
        self.it.trained(self.batches)
        assert self.it.outstanding == 0


TestBound = Bound.TestCase
TestBound.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
