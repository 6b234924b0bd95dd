import math
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lachesis.pipeline.batcher.batch_choice import choose_batch
from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.governor.logic import Governor
from lachesis.pipeline.ledger.producer_dedup import ResolvedSet
from lachesis.schemas.control import AdmissionStatus, LeaseReply, LeaseRequest
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import Batch, GroupRef, LedgerEntry
from lachesis.schemas.planning_header import Plan
from lachesis.schemas.subjects import CALLS, EVENTS, LEDGER, ROLLOUTS, TEACHER

BATCHING = BatchingConfig(batch_size=8, max_staleness=2)
FLOW = FlowConfig(lease_s=10.0, reserved_share=0.5)


def governor(
    grants_from_s: float = -math.inf, *, batching: BatchingConfig = BATCHING, term: str = "t", steps: int | None = None
) -> Governor:
    it = Governor(FLOW, batching, term=term, grants_from_s=grants_from_s, steps=steps)
    it.usage({name: usage(0) for name in (ROLLOUTS, EVENTS, TEACHER)}, 1e9)  # as if measured just now, always
    return it


def acquire(env: str = "a", sequences: int = 4, size: int = 1000) -> LeaseRequest:
    return LeaseRequest(op="acquire", producer="p", env=env, sequences=sequences, bytes=size)


def plan(sequences: int = 4, lease: str | None = None) -> Plan:
    return Plan(
        group=new_group_id(),
        sequences=3 * sequences,  # a sample has several, and counts once
        samples=sequences,
        tokens=100,
        policy_step=0,
        producer="p",
        epoch=1,
        counter=0,
        started_ns=1,
        lease=lease,
    )


def in_touch(it: Governor, start_s: float, end_s: float) -> None:
    """Let time pass in which the broker answers every second and the log is read."""
    for second in range(int(end_s - start_s) + 1):
        it.record_contact(start_s + second)
    it.mark_seen_until(end_s)


def entry(resolved: ResolvedSet, next_batch: int, batch: Batch | None = None) -> LedgerEntry:
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
    assert all(it.answer_request(acquire(), 0.0).granted for _ in range(6))
    refused = it.answer_request(acquire(), 0.0)
    assert not refused.granted
    assert "24 of 24 sequences are outstanding" in str(refused.reason)
    assert refused.retry_s == FLOW.retry_s


def test_a_group_larger_than_a_batch_is_told_so() -> None:
    assert "can never be admitted" in str(governor().answer_request(acquire(sequences=9), 0.0).reason)


def test_a_stored_rollout_takes_the_place_of_its_lease() -> None:
    it = governor()
    lease = it.answer_request(acquire(), 0.0).lease
    it.member(1, "a", plan(lease=lease), 0.0)
    assert (it.leased, it.accepted, it.outstanding) == (0, 4, 4)


@pytest.mark.parametrize(("calls", "renewed_s", "lost_s"), [(0, None, 4 * 2.5), (0, 5.0, 4 * 7.5), (9, 5.0, 0.0)])
def test_what_a_killed_process_had_generated_is_bounded_by_the_renewal_that_did_not_come(
    calls: int, renewed_s: float | None, lost_s: float
) -> None:
    """Where calls are recorded, another process goes on with them. One whose group is stored has lost nothing."""
    it = governor()
    first, lost = (it.answer_request(acquire().replace(calls=calls), 0.0).lease for _ in range(2))
    it.member(1, "a", plan(lease=first), 1.0)
    if renewed_s is not None:
        it.answer_request(LeaseRequest(op="renew", producer="p", env="a", lease=lost), renewed_s)
    it.mark_seen_until(20.0)
    assert it.metrics()["flow/expired"] == 1
    assert it.metrics()["flow/lost_seconds"] == pytest.approx(lost_s)
    assert it.metrics()["flow/lost_groups"] == (not calls)


def test_an_environment_neither_renews_nor_ends_the_lease_of_another() -> None:
    it = governor()
    lease = it.answer_request(acquire("a"), 0.0).lease
    for op in ("renew", "release"):
        it.answer_request(LeaseRequest(op=op, producer="p", env="b", lease=lease), 1.0)
    it.member(1, "b", plan(lease=lease), 1.0)
    assert it.leased == 4
    it.mark_seen_until(11.0)
    assert it.leased == 0, "it was not renewed by the other one"
    later = governor(grants_from_s=math.inf)
    assert later.answer_request(renewal(lease, 8, env="b"), 12.0).granted, "what it says that it was granted"
    assert later.answer_request(renewal(lease), 12.0).granted, "and after a restart each has its own"
    assert later.leased == 12
    later.answer_request(LeaseRequest(op="release", producer="p", env="b", lease=lease), 13.0)
    assert later.leased == 4


def test_a_rollout_whose_lease_ran_out_still_counts() -> None:
    it = governor()
    lease = it.answer_request(acquire(), 0.0).lease
    it.mark_seen_until(11.0)
    assert it.outstanding == 0
    it.member(1, "a", plan(lease=lease), 0.0)
    assert it.outstanding == 4


def test_capacity_returns_when_the_batch_is_trained_and_at_once_when_a_group_is_dropped() -> None:
    it = governor()
    for seq in (1, 2, 3):
        it.member(seq, "a", plan(), 0.0)
    it.entry(entry(ResolvedSet(2), 1, batch(0, 8)))
    assert (it.accepted, it.untrained, it.outstanding) == (4, 8, 12)
    it.trained(1)
    assert it.outstanding == 4
    it.entry(entry(ResolvedSet(3), 1))  # the third had no variance, say
    assert it.outstanding == 0


def test_a_rollout_read_after_its_outcome_counts_nothing() -> None:
    it = governor()
    it.entry(entry(ResolvedSet(5), 1, batch(0, 8)))
    it.trained(1)
    it.member(3, "a", plan(), 0.0)
    assert it.outstanding == 0


def test_after_a_restart_batches_never_seen_count_in_full() -> None:
    it = governor()
    it.entry(entry(ResolvedSet(5), 7))
    it.trained(5)
    assert it.untrained == 16


def test_grants_nothing_before_earlier_leases_have_run_out() -> None:
    it = governor(grants_from_s=100.0)
    reply = it.answer_request(acquire(), 95.0)
    assert not reply.granted
    assert reply.retry_s == 5.0
    in_touch(it, 95.0, 100.0)
    assert it.answer_request(acquire(), 100.0).granted


def test_a_renewed_lease_lives_on_and_an_ended_one_cannot_be_renewed() -> None:
    it = governor()
    lease = it.answer_request(acquire(), 0.0).lease
    assert it.answer_request(renewal(lease), 9.0).granted
    it.mark_seen_until(15.0)
    assert it.leased == 4
    it.mark_seen_until(19.0)
    assert not it.answer_request(renewal(lease), 19.5).granted


def renewal(lease: str | None, sequences: int = 4, size: int = 1000, *, env: str = "a") -> LeaseRequest:
    """Return the request of a producer that was granted as much."""
    return LeaseRequest(op="renew", producer="p", env=env, lease=lease, sequences=sequences, bytes=size)


def filled(it: Governor, now_s: float = 0.0) -> list[str]:
    """Take all there is, in groups of four."""
    leases = []
    while (reply := it.answer_request(acquire(), now_s)).granted and reply.lease:
        leases.append(reply.lease)
    return leases


def test_a_lease_whose_time_is_over_counts_until_the_log_was_read_up_to_then() -> None:
    it = governor()
    it.record_contact(0.0)
    leases = filled(it)
    for now_s in range(1, 15):
        it.record_contact(now_s)  # it is not cut off; it only has not read what was stored
    assert not it.answer_request(acquire(), 14.0).granted
    assert it.is_due(14.0)
    for seq, lease in enumerate(leases, 1):
        it.member(seq, "a", plan(lease=lease), 14.0)
    it.mark_seen_until(14.0)
    assert (it.leased, it.accepted, it.metrics()["flow/late"]) == (0, it.capacity, 0)


def test_a_governor_that_was_cut_off_gives_producers_a_lease_period_to_renew() -> None:
    it = governor()
    it.record_contact(0.0)
    kept, *given_up = filled(it)
    it.record_contact(30.0)
    it.mark_seen_until(30.0)
    assert it.outstanding == it.capacity
    in_touch(it, 30.0, 39.0)
    assert it.answer_request(renewal(kept), 39.0).granted
    it.mark_seen_until(40.0)
    assert it.outstanding == 4
    assert not it.answer_request(renewal(given_up[0]), 40.0).granted


def test_a_governor_that_was_cut_off_while_it_waited_waits_anew() -> None:
    before, it = governor(), governor(grants_from_s=10.0, term="u")
    it.record_contact(0.0)
    it.record_contact(30.0)
    assert not it.answer_request(acquire(), 30.0).granted
    in_touch(it, 30.0, 39.0)
    assert all(it.answer_request(renewal(lease), 39.0).granted for lease in filled(before))
    assert not it.answer_request(acquire(), 40.0).granted


def test_the_next_life_takes_over_leases_even_if_what_came_late_passed_the_bound() -> None:
    before, it = governor(), governor(grants_from_s=10.0, term="u")
    for seq in (1, 2):
        it.member(seq, "a", plan(lease="t.9"), 0.0)
    assert all(it.answer_request(renewal(lease), 1.0).granted for lease in filled(before))
    assert it.outstanding == it.capacity + 8
    assert not it.answer_request(renewal("t.7", sequences=1), 1.0).granted, (
        "no earlier life can have leased more than there is"
    )
    assert not it.answer_request(renewal("t.8", sequences=0), 1.0).granted


def test_a_released_lease_frees_its_share() -> None:
    it = governor()
    lease = it.answer_request(acquire(), 0.0).lease
    assert it.answer_request(LeaseRequest(op="release", producer="p", env="a", lease=lease), 1.0).granted
    assert it.outstanding == 0


def test_a_fast_environment_leaves_the_slow_ones_their_minimum() -> None:
    it = governor()
    slow = [f"slow{i}" for i in range(5)]
    for env in slow:  # they sent requests before and hold nothing now
        lease = it.answer_request(acquire(env), 0.0).lease
        it.answer_request(LeaseRequest(op="release", producer="p", env=env, lease=lease), 0.0)
    while it.answer_request(acquire("fast"), 1.0).granted:
        pass
    assert it.outstanding < it.capacity
    assert "kept for environments that have less" in str(it.answer_request(acquire("fast"), 1.0).reason)
    assert all(it.answer_request(acquire(env, sequences=2), 1.0).granted for env in slow)


def test_an_environment_alone_may_use_everything() -> None:
    it = governor()
    granted = 0
    while it.answer_request(acquire("only"), 0.0).granted:
        granted += 4
    assert granted == it.capacity


def test_a_nearly_full_stream_closes_admission_before_it_is_full() -> None:
    it = governor()
    it.usage({ROLLOUTS: StreamUsage(1, 10, 10, 700, 1000), EVENTS: usage(0), TEACHER: usage(0)}, 0.0)
    assert it.answer_request(acquire(size=90), 0.0).granted
    reply = it.answer_request(acquire(size=90), 0.0)
    assert not reply.granted
    assert "ROLLOUTS holds 700 bytes" in str(reply.reason)


def test_producers_that_wait_for_a_full_ledger_are_known_to_wait() -> None:
    it = governor()
    it.usage({LEDGER: StreamUsage(1, 10, 10, 900, 1000), ROLLOUTS: usage(0), EVENTS: usage(0), TEACHER: usage(0)}, 0.0)
    reply = it.answer_request(acquire(size=90), 0.0)
    assert "LEDGER holds 900 bytes" in str(reply.reason)
    assert not reply.never
    pressure = it.budget.pressure(LEDGER)
    assert (pressure.excess, pressure.short) == (400, 100)
    assert it.budget.pressure(LEDGER).short == 0  # no request was refused since


def test_a_group_larger_than_a_budget_is_told_so_and_blocks_nobody() -> None:
    it = governor()
    it.usage({ROLLOUTS: StreamUsage(1, 1, 1, 0, 100_000), EVENTS: usage(0), TEACHER: usage(0)}, 0.0)
    reply = it.answer_request(acquire("large", size=80_001), 0.0)
    assert "80001 bytes in stream ROLLOUTS can never be admitted: 80000 are all" in str(reply.reason)
    assert reply.never
    assert not it.blocked  # no smaller batch could help it
    assert it.answer_request(acquire("large", size=80_000), 0.0).granted


def test_annotations_still_to_come_are_reserved_too() -> None:
    it = governor()
    per_group = FLOW.event_bytes_per_group + 4 * FLOW.event_bytes_per_sequence
    it.usage({EVENTS: StreamUsage(1, 1, 1, 0, int(per_group * 2.5))}, 0.0)
    it.member(1, "a", plan(), 0.0)
    assert it.answer_request(acquire(), 0.0).granted
    assert "EVENTS" in str(it.answer_request(acquire(), 0.0).reason)


def usage(held: int) -> StreamUsage:
    return StreamUsage(1, 1, 1, held, 1 << 40)


def test_a_lease_whose_calls_are_recorded_needs_room_for_them_and_keeps_it_until_it_ends() -> None:
    it = governor()
    it.usage({CALLS: StreamUsage(1, 1, 1, 0, 1000)}, 1e9)
    request = acquire().replace(calls=500)
    lease = it.answer_request(request, 0.0).lease
    refused = it.answer_request(request, 0.0)
    assert not refused.granted
    assert "CALLS" in str(refused.reason)
    assert it.answer_request(acquire(), 0.0).granted, "calls that are not recorded need none"
    it.answer_request(LeaseRequest(op="release", producer="p", env="a", lease=lease), 1.0)
    assert it.answer_request(request, 1.0).granted
    assert it.answer_request(acquire().replace(calls=5000), 1.0).never


def test_nothing_is_granted_blindly() -> None:
    it = Governor(FLOW, BATCHING, term="t")
    assert "unknown" in str(it.answer_request(acquire(), 0.0).reason)
    it.usage({EVENTS: usage(0)}, 1.0)
    assert it.answer_request(acquire(), 2.0).granted
    assert "unknown" in str(it.answer_request(acquire(), 60.0).reason)
    assert not it.blocked


def test_the_next_life_takes_over_leases_that_are_renewed_while_it_waits() -> None:
    before, after = governor(), governor(grants_from_s=10.0, term="u")
    name = before.answer_request(acquire(sequences=5), 0.0).lease
    assert after.answer_request(renewal(name, 5), 3.0).granted
    assert after.leased == 5
    assert after.answer_request(renewal(name, 8), 3.0).granted
    assert after.leased == 5, "what it was taken over with holds"
    after.member(1, "a", plan(5, name), 4.0)
    assert (after.leased, after.accepted) == (0, 5)
    late = before.answer_request(acquire(sequences=5), 0.0).lease
    in_touch(after, 3.0, 10.0)
    assert not after.answer_request(renewal(late, 5), 10.0).granted


@pytest.mark.parametrize(
    ("sequences", "size"),
    [(0, 0), (4, 0), (0, 1000), (9, 1000), (4, 1 << 62)],  # not said, or more than can ever have been granted
)
def test_a_lease_is_not_taken_over_unless_its_producer_says_what_may_have_been_granted(
    sequences: int, size: int
) -> None:
    after = governor(grants_from_s=10.0)
    assert not after.answer_request(renewal("t.1.a.4.1000", sequences, size), 3.0).granted
    assert after.leased == 0


def test_blocked_means_that_nothing_under_way_can_help() -> None:
    it = governor(batching=BatchingConfig(batch_size=8, max_staleness=0))
    leases = [it.answer_request(acquire(sequences=3), 0.0).lease for _ in range(2)]
    assert not it.answer_request(acquire(sequences=3), 0.0).granted
    assert not it.blocked  # two are running
    for seq, lease in enumerate(leases, 1):
        it.member(seq, "a", plan(3, lease), 0.0)
    assert not it.blocked  # no request since
    assert not it.answer_request(acquire(sequences=3), 0.0).granted
    assert it.blocked
    assert it.status("r") == AdmissionStatus(run="r", blocked=True, last_rollout=2, last_entry=-1)
    it.entry(entry(ResolvedSet(2), 1, batch(0, 6)))
    assert not it.answer_request(acquire(sequences=3), 0.0).granted
    assert not it.blocked  # the trainer has a batch
    it.trained(1)
    assert it.answer_request(acquire(sequences=3), 0.0).granted


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("big", [8, 16])
def test_one_fast_and_fifteen_slow_environments_all_get_their_part(staleness: int, big: int) -> None:
    """The fast one always has 16 requests, each slow one the next when its last group is trained, one a large one."""
    it = governor(batching=BatchingConfig(batch_size=64, max_staleness=staleness))
    slow = [f"slow{i}" for i in range(15)]
    sizes = dict.fromkeys(slow, 8) | {"slow0": big, "fast": 8}
    done, stored, seq, now, trained = Counter[str](), {}, 0, 0.0, 0
    running: dict[str, str] = {}
    for _ in range(400):
        now += 0.25
        for env in ["fast"] * 16 + slow:
            if env in running:
                continue
            reply = it.answer_request(acquire(env, sizes[env]), now)
            if not reply.granted or reply.lease is None:
                continue
            if env != "fast":
                running[env] = reply.lease
            seq += 1
            it.member(seq, env, plan(sizes[env], reply.lease), now)
            stored[seq] = env
        if sum(sizes[env] for env in stored.values()) >= 64 or it.blocked:
            it.entry(entry(ResolvedSet(seq), trained + 1, batch(trained, 64)))
            trained += 1
            it.trained(trained)
            for env in stored.values():
                done[env] += 1
                running.pop(env, None)
            stored.clear()
    rounds = min(done[env] for env in slow)
    assert rounds * 8 >= 0.3 * 64 * trained / 16, "a slow environment starves"
    assert done["fast"] * 8 >= 64 * trained / 16, "the fast one gets less than an equal part"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mix", "generates_s", "share"),
    [
        ({"fast": 3.0, "slow": 1.0}, 1.0, 0.25),
        ({"fast": 1.0, "slow": 3.0}, 1.0, 0.75),
        ({"fast": 9.0, "slow": 1.0}, 4.0, 0.1),
        ({"fast": 1.0, "slow": 9.0}, 1.0, 0.9),
        ({"fast": 1.0}, 1.0, 0.5),
    ],
)
def test_two_environments_of_different_speed_have_their_shares_of_the_batches(
    mix: dict[str, float], generates_s: float, share: float
) -> None:
    """Each wants more than there is. The fast one needs no time for a group; a step takes four seconds."""
    config = BatchingConfig(batch_size=64, max_staleness=2, mix=mix)
    it = governor(batching=config)
    running: dict[tuple[str, int], tuple[float, str]] = {}
    ready: list[GroupRef] = []
    batched: list[Counter[str]] = []
    asks_s = dict.fromkeys([(env, i) for env in ("fast", "slow") for i in range(40)], 0.0)
    seq = trained = 0
    step_ends_s = 4.0
    for tick in range(1600):
        now = tick / 20
        for who, (until_s, lease) in list(running.items()):
            if until_s <= now:
                del running[who]
                seq += 1
                it.member(seq, who[0], plan(4, lease), now)
                ready.append(
                    GroupRef(group="g", seq=seq, env=who[0], advantages=[0.0], sequences=4, tokens=1, policy_step=0)
                )
        for who, asks_from_s in asks_s.items():
            if who in running or asks_from_s > now:
                continue
            reply = it.answer_request(acquire(who[0]), now)
            asks_s[who] = now if reply.granted else now + 0.25
            if reply.lease is not None:
                running[who] = (now + (generates_s if who[0] == "slow" else 0.0), reply.lease)
        while chosen := choose_batch(ready, 64, mix=mix):
            ready = [ref for ref in ready if ref not in chosen]
            resolved = ResolvedSet(min((ref.seq for ref in ready), default=seq + 1) - 1)
            for ref in chosen:
                resolved.mark(ref.seq)
            it.entry(entry(resolved, len(batched) + 1, batch(len(batched), 64)))
            batched.append(Counter(ref.env for ref in chosen))
        if now >= step_ends_s and trained < len(batched):
            trained += 1
            it.trained(trained)
            step_ends_s = now + 4.0
        assert it.outstanding <= it.capacity
    assert trained >= 19, "the trainer never waits"
    later = sum(batched[5:], Counter())  # at the start the one that needs no time fills what there is
    assert later["slow"] / later.total() == pytest.approx(share, abs=0.04)


class Bound(RuleBasedStateMachine):
    """Whatever the order of requests, rollouts, outcomes, steps, restarts, cut-offs and time: the bound holds, capacity
    returns.

    What is published by a producer that fell silent, whose lease may have run out, is the one thing that may exceed the
    bound. The log goes on while the governor is cut off from it, and is read with a delay of any length.
    """

    def __init__(self) -> None:
        super().__init__()
        self.it = governor()
        self.life = 0
        self.now = 0.0
        self.cut_off = False
        self.renewed = True
        self.seq = 0
        self.leases: dict[str, int] = {}
        self.env_of: dict[str, str] = {}
        self.lost: dict[str, int] = {}
        self.open: dict[int, int] = {}
        self.late: set[int] = set()
        self.sizes: dict[int, int] = {}
        self.unread: list[tuple[int, int, str]] = []
        self.untold: list[LedgerEntry] = []
        self.resolved = ResolvedSet()
        self.batches = 0
        self.trained = 0

    # the run

    @precondition(lambda self: not self.cut_off)
    @rule(env=st.sampled_from("abc"), sequences=st.integers(1, 9), groups=st.sampled_from([1, 9]))
    def ask(self, env: str, sequences: int, groups: int) -> None:
        for _ in range(groups):
            before = self.it.outstanding
            reply: LeaseReply = self.it.answer_request(acquire(env, sequences), self.now)
            if reply.granted and reply.lease:
                assert before + sequences <= self.it.capacity
                self.leases[reply.lease] = sequences
                self.env_of[reply.lease] = env

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        self._store(self.leases.pop(lease), lease)

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def publish_late(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.lost)))
        self.late.add(self.seq + 1)
        self._store(self.lost.pop(lease), lease)

    def _store(self, sequences: int, lease: str) -> None:
        self.seq += 1
        self.open[self.seq] = sequences
        self.unread.append((self.seq, sequences, lease))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), batched=st.booleans())
    def resolve(self, data: st.DataObject, batched: bool) -> None:
        seq = data.draw(st.sampled_from(sorted(self.open)))
        sequences = self.open.pop(seq)
        self.resolved.mark(seq)
        made = None
        if batched:
            made = batch(self.batches, sequences)
            self.sizes[self.batches] = sequences if seq not in self.late else 0
            self.batches += 1
        self.untold.append(entry(self.resolved, self.batches, made))

    @precondition(lambda self: self.trained < self.batches)
    @rule()
    def train(self) -> None:
        self.trained += 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fall_silent(self, data: st.DataObject) -> None:
        """A producer stops renewing; what it holds runs out some time."""
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        self.lost[lease] = self.leases.pop(lease)

    @rule(quarters=st.integers(1, 6))
    def wait(self, quarters: int) -> None:
        """Live producers renew four times in a lease's time, if they reach the governor."""
        for _ in range(quarters):
            self.now += FLOW.lease_s / 4
            if self.cut_off:
                continue
            for lease in self.leases:
                again = renewal(lease, self.leases[lease], env=self.env_of[lease])
                assert self.it.answer_request(again, self.now).granted
            self.renewed = True

    # the governor

    @precondition(lambda self: not self.cut_off)
    @rule(messages=st.integers(0, 3), entries=st.integers(0, 3), step=st.booleans())
    def follow(self, messages: int, entries: int, step: bool) -> None:
        """Read on in the log, each stream at its own pace."""
        for seq, sequences, lease in self.unread[:messages]:
            self.it.member(seq, self.env_of[lease], plan(sequences, lease), self.now)
            self.it.member(seq, self.env_of[lease], plan(sequences, lease), self.now)  # read twice
        for each in self.untold[:entries]:
            self.it.entry(each)
        del self.unread[:messages], self.untold[:entries]
        if step:
            self.it.trained(self.trained)

    @precondition(lambda self: not self.cut_off)
    @rule()
    def let_run_out(self) -> None:
        self.it.record_contact(self.now)
        if self.it.is_due(self.now):
            self.follow(len(self.unread), 0, step=False)
            self.it.mark_seen_until(self.now)

    @precondition(lambda self: not self.cut_off and self.renewed)
    @rule()
    def cut(self) -> None:
        self.cut_off = True

    @precondition(lambda self: self.cut_off)
    @rule()
    def mend(self) -> None:
        """The connection is back. Any of requests, renewals, reading and looking at the clock may come first."""
        self.cut_off = self.renewed = False

    @precondition(lambda self: not self.cut_off)
    @rule()
    def restart(self) -> None:
        self.life += 1
        self.it = governor(grants_from_s=math.inf, term=f"t{self.life}")
        self.it.entry(entry(self.resolved, self.batches))
        self.it.trained(self.trained)
        self.it.record_contact(self.now)
        for seq, sequences in self.open.items():
            self.it.member(seq, "a", plan(sequences), self.now)
        self.unread.clear()
        self.untold.clear()
        self.it.wait_until(self.now + FLOW.lease_s)

    @invariant()
    def bounded(self) -> None:
        late = sum(self.open.get(seq, 0) for seq in self.late)
        untrained = sum(size for number, size in self.sizes.items() if number >= self.trained)
        true = sum(self.leases.values()) + sum(self.open.values()) + untrained
        assert true - late <= self.it.capacity

    def teardown(self) -> None:
        self.cut_off = False
        self.leases.clear()
        self.untold.append(entry(ResolvedSet(self.seq), self.batches))
        self.trained = self.batches
        self.follow(len(self.unread), len(self.untold), step=True)
        for _ in range(4 * int(FLOW.lease_s)):
            self.now += 1.0
            self.let_run_out()
        assert self.it.outstanding == 0
        assert self.it.answer_request(acquire(sequences=8), self.now).granted


TestBound = Bound.TestCase
TestBound.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_halted_environment_gets_no_lease_and_the_others_do() -> None:
    it = governor()
    assert it.answer_request(acquire("a"), 0.0).granted
    it.halt("a", "a is halted")
    refused = it.answer_request(acquire("a"), 0.0)
    assert (refused.granted, refused.reason, refused.closed) == (False, "a is halted", True)
    assert it.answer_request(acquire("b"), 0.0).granted
    assert not it.blocked  # no batch is cut short for it
    it.halt("a", None)
    assert it.answer_request(acquire("a"), 0.0).granted


def test_no_group_is_admitted_into_the_last_room_of_the_disk() -> None:
    it = governor()
    it.budget.disk_bytes = 50_000
    granted = 0
    while (reply := it.answer_request(acquire(), 1.0)).granted:
        granted += 1
    assert granted > 0
    assert "the disk of the streams is nearly full" in str(reply.reason)
    it.budget.disk_bytes = 10**9
    assert it.answer_request(acquire(), 1.0).granted


def test_a_disk_that_nothing_is_known_of_stops_nobody() -> None:
    it = governor()
    assert it.budget.disk_bytes is None
    assert it.answer_request(acquire(), 1.0).granted


def test_what_fills_a_stream_is_known_for_promises() -> None:
    it = governor()
    it.usage({ROLLOUTS: StreamUsage(1, 10, 10, 700, 100_000), EVENTS: usage(0), TEACHER: usage(0)}, 0.0)
    assert not it.budget.is_mostly_promised(ROLLOUTS)
    assert it.answer_request(acquire(), 1.0).granted
    assert it.budget.is_mostly_promised(ROLLOUTS)
    assert "700 bytes, and 1,000 more are promised to groups under way: " in it.budget.explain_promises(ROLLOUTS)


def test_after_the_last_batch_nothing_is_granted_and_after_the_last_step_nothing_is_outstanding() -> None:
    it = governor(steps=2)
    it.member(1, "a", plan(), 0.0)
    it.entry(entry(ResolvedSet(0), next_batch=1))
    assert it.answer_request(acquire(), 0.0).granted
    it.entry(entry(ResolvedSet(0), next_batch=2))
    reply = it.answer_request(acquire(), 0.0)
    assert (reply.granted, reply.reason) == (
        False,
        "the batches of all 2 steps are formed: no more rollouts are needed",
    )
    it.trained(1)
    assert it.metrics()["flow/outstanding"] == 4 + 4 + 8  # leased, stored, and a batch to be trained
    it.trained(2)
    assert not {"flow/outstanding", "flow/capacity"} & it.metrics().keys()
    it.trained(1)  # a trainer that started again steps back
    assert it.metrics()["flow/outstanding"] == 16


@pytest.mark.parametrize(("mix", "kept_for_b"), [({}, 6), ({"b": 3.0}, 9), ({"a": 3.0}, 3)])
def test_the_part_that_is_kept_for_an_environment_is_as_large_as_its_weight_in_a_batch(
    mix: dict[str, float], kept_for_b: int
) -> None:
    it = governor(batching=BatchingConfig(batch_size=8, max_staleness=2, mix=mix))  # 24 sequences, 12 of them in parts
    assert it.answer_request(acquire("b", 1), 0.0).granted
    granted = 0
    while it.answer_request(acquire("a", 1), 0.0).granted:
        granted += 1
    assert granted == 24 - kept_for_b
    for _ in range(kept_for_b - 1):
        assert it.answer_request(acquire("b", 1), 0.0).granted


def generated(env: str, step: int, *, outdated_only: bool = False) -> LeaseRequest:
    return acquire(env).replace(policy_step=step, outdated_only=outdated_only)


def full_of_batches() -> Governor:
    """Return a governor whose capacity is taken by the batches 0 to 2, of which none is trained."""
    it = governor(batching=BatchingConfig(batch_size=8, max_staleness=2))
    for number in range(3):
        it.entry(entry(ResolvedSet(), number + 1, batch(number, 8)))
    return it


def test_a_group_too_old_for_every_batch_is_stored_beyond_the_capacity_and_counts_for_nothing() -> None:
    it = full_of_batches()
    assert it.outstanding == it.capacity
    assert not it.answer_request(generated("a", 1, outdated_only=True), 0.0).granted, "batch 3 may have it"
    assert not it.answer_request(generated("a", 0), 0.0).granted, "nor is there room"
    reply = it.answer_request(generated("a", 0, outdated_only=True), 0.0)
    assert reply.granted
    assert it.leased == 0
    it.member(1, "a", plan(4, reply.lease), 0.0)
    assert it.outstanding == it.capacity
    resolved = ResolvedSet()
    resolved.mark(1)
    it.entry(entry(resolved, 3, None))
    assert it.outstanding == it.capacity


def test_a_group_that_will_be_too_old_for_the_batch_that_has_room_takes_none_of_it() -> None:
    it = full_of_batches()
    it.trained(1)
    reply = it.answer_request(generated("a", 0), 0.0)
    assert not reply.granted
    assert "too old for the batch 3" in (reply.reason or "")
    assert it.answer_request(generated("a", 1), 0.0).granted


@pytest.mark.parametrize(("away_s", "kept"), [(1.0, True), (5.0, True), (30.0, False)])
def test_the_turn_of_an_environment_that_lost_groups_is_kept_while_it_makes_new_ones(away_s: float, kept: bool) -> None:
    """It was away for 5 s the last time; the other one has an equal weight, and asks when there is room again."""
    it = full_of_batches()
    assert it.answer_request(generated("slow", 0, outdated_only=True), 0.0).granted
    assert not it.answer_request(generated("slow", 1), 5.0).granted
    assert it.answer_request(generated("slow", 0, outdated_only=True), 5.0).granted
    it.trained(1)
    replies = [it.answer_request(acquire("fast"), 5.0 + away_s) for _ in range(2)]
    assert [reply.granted for reply in replies] == [True, not kept]


def test_a_refusal_of_an_outdated_group_is_no_want_of_room() -> None:
    """Seen: batches left with four sequences while the clients of outdated groups were about to make new ones."""
    it = full_of_batches()
    it.trained(3)
    refused = it.answer_request(generated("a", 0), 0.0)
    assert "too old for the batch 3" in (refused.reason or "")
    assert not it.blocked
    assert it.answer_request(generated("a", 1), 0.0).granted


@pytest.mark.parametrize("idle", [True, False])
def test_room_that_is_kept_for_others_is_granted_once_nothing_is_under_way(idle: bool) -> None:
    """Otherwise groups that do not add up to a batch would wait until the others are forgotten."""
    it = governor(batching=BatchingConfig(batch_size=8, max_staleness=2))
    first = it.answer_request(acquire("b", 3), 0.0)
    it.answer_request(LeaseRequest(op="release", producer="p", env="b", lease=first.lease), 0.0)
    for seq in range(1, 4):
        lease = it.answer_request(acquire("a", 5), 0.0).lease
        it.member(seq, "a", plan(5, lease), 0.0)
    kept = it.answer_request(acquire("a", 5), 0.0)
    assert "kept for environments that have less" in (kept.reason or "")
    assert not it.blocked, "there is room"
    assert not it.answer_request(acquire("a", 5), 0.5).granted
    if not idle:
        assert it.answer_request(acquire("b", 1), 0.6).granted
    assert it.answer_request(acquire("a", 5), 1.5).granted is idle


def test_one_whose_groups_are_trained_at_once_does_not_go_before_the_others() -> None:
    """It holds nothing whenever it requests, and so less than its part; but it had more than its share."""
    it = governor(batching=BatchingConfig(batch_size=8, max_staleness=2, mix={"a": 1.0, "b": 3.0}))

    def granted_and_trained_at_once() -> bool:
        reply = it.answer_request(acquire("a"), 0.0)
        if reply.granted:
            it.answer_request(LeaseRequest(op="release", producer="p", env="a", lease=reply.lease), 0.0)
        return reply.granted

    assert granted_and_trained_at_once()
    for _ in range(5):
        assert it.answer_request(acquire("b"), 0.0).granted
    assert "kept for environments that have less" in (it.answer_request(acquire("b"), 0.0).reason or "")
    assert sum(granted_and_trained_at_once() for _ in range(10)) <= 2
    assert it.answer_request(acquire("b"), 0.0).granted, "nothing is kept for one that had more"


def test_a_reply_says_whether_other_environments_request_leases_too() -> None:
    it = governor()
    assert not it.answer_request(acquire("a"), 0.0).contended
    assert it.answer_request(acquire("b"), 1.0).contended
    assert it.answer_request(acquire("a"), 2.0).contended
    assert not it.answer_request(acquire("a"), 2.0 + FLOW.lease_s).contended, "the other one is silent"


def test_a_request_that_waits_is_granted_after_a_change_and_says_nothing_of_contact():
    it, changes = governor(batching=BatchingConfig(batch_size=8, max_staleness=0)), []
    it.on_change = lambda: changes.append(None)
    it.record_contact(0.0)
    held = it.answer_request(acquire(sequences=8), 0.0)
    assert not it.answer_request(acquire(sequences=8), 0.0).granted
    changes.clear()
    for second in range(1, 30):  # nothing else is heard: the holder could not renew
        assert not it.reconsider(acquire(sequences=8), float(second)).granted
    it.record_contact(30.0)
    it.mark_seen_until(31.0)
    assert it.leased == 8
    it.answer_request(LeaseRequest(op="release", producer="p", env="a", lease=held.lease), 31.0)
    assert changes
    assert it.reconsider(acquire(sequences=8), 31.0).granted
