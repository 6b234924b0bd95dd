"""The join under every interleaving: redelivery, restarts from the last entry, duplicates, lies."""

from dataclasses import dataclass, field
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.pipeline.batcher import pending_annotations as early_module
from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.batcher.join import Joiner
from lachesis.pipeline.ledger.producer_dedup import ResolvedSet
from lachesis.schemas.alerts import EnvironmentStanding, RolloutRange
from lachesis.schemas.annotations import DeadKind, DeadLetter, GroupReward, TeacherPointer, Verdict
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.planning_header import Plan

SECOND = 1_000_000_000


def gid(n: int) -> str:
    return f"{n:032x}"


def make_plan(n: int, *, sequences: int = 12, samples: int = 4, tokens: int = 40, step: int = 0) -> Plan:
    return Plan(
        group=gid(n),
        sequences=sequences,
        samples=samples,
        tokens=tokens,
        policy_step=step,
        producer="env-1",
        epoch=1,
        counter=n,
        started_ns=0,
    )


def make_reward(n: int, seq: int, verdict: Verdict = "trainable", samples: int = 4) -> GroupReward:
    return GroupReward(
        group=gid(n),
        seq=seq,
        item="i",
        policy_step=0,
        verdict=verdict,
        scores=[0.5] * samples,
        rewards=[0.5] * samples,
        advantages=[1.0] * samples,
        snapshot="s",
        mean=0.5,
        std=0.0,
        range=0.0,
        n_valid=samples,
    )


def make_letter(seq: int, stage: str = "scorer", kind: DeadKind = "data", stream: str = "ROLLOUTS") -> DeadLetter:
    return DeadLetter(
        leased=True,
        run="r",
        env="e",
        revision="live",
        stage=stage,
        kind=kind,
        stream=stream,
        seq=seq,
        group=None,
        reason="bad",
        place="here",
        time_ns=0,
    )


def make_entry(joiner: Joiner) -> LedgerEntry:
    state = joiner.state()
    return LedgerEntry(
        run="r",
        trainer="t",
        index=0,
        previous="",
        watermark=state.watermark,
        resolved=state.resolved,
        events_cursor=state.events_cursor,
        producers=state.producers,
    )


def outcomes(joiner: Joiner) -> dict[int, str]:
    return {member.seq: member.outcome.kind for member in joiner.take_outcomes(1000) if member.outcome}


CONFIG = BatchingConfig(batch_size=8, max_staleness=1)

# the world: what the two streams hold


@dataclass
class World:
    rollouts: dict[int, Plan | None] = field(default_factory=dict)
    events: dict[int, list[GroupReward | TeacherPointer | DeadLetter]] = field(default_factory=dict)
    lies: bool = False  # annotations that name a group and another group's sequence


@st.composite
def worlds(draw: st.DrawFn) -> World:
    world = World(lies=draw(st.integers(0, 4)) == 0)
    seq, groups = 0, draw(st.integers(1, 8))
    for _ in range(draw(st.integers(1, 12))):
        seq += draw(st.integers(1, 3))  # between them lie other runs' rollouts and chunks
        n = draw(st.integers(0, groups))
        world.rollouts[seq] = (
            None if draw(st.integers(0, 9)) == 0 else make_plan(n, samples=12 if n == 5 else 4, step=n % 3)
        )
    seqs = st.integers(1, seq + 3)
    known = st.sampled_from([(p.group, s) for s, p in world.rollouts.items() if p] or [(gid(99), 1)])
    nobody = st.tuples(st.integers(groups + 1, groups + 3).map(gid), seqs)
    target = st.one_of(known, known, known, nobody)
    if world.lies:
        target = st.one_of(known, st.tuples(st.integers(0, groups).map(gid), seqs))
    verdicts = st.sampled_from(["trainable", "trainable", "zero_variance", "unscorable", "quarantined"])
    event = 0
    for _ in range(draw(st.integers(0, 20))):
        event += draw(st.integers(1, 2))
        if draw(st.integers(0, 3)) == 0:
            stage = draw(st.sampled_from(["scorer", "teacher", "curriculum"]))
            world.events[event] = [make_letter(draw(target)[1], stage)]
            continue
        teaches = draw(st.booleans())
        world.events[event] = [
            TeacherPointer(group=group, seq=at, stored=draw(st.sampled_from([None, 7])))
            if teaches
            else make_reward(int(group, 16), at, draw(verdicts))
            for group, at in draw(st.lists(target, min_size=1, max_size=3))
        ]
    return world


@dataclass
class Writer:
    """One life after another of the ledger's writer, as the stage drives it."""

    world: World
    config: BatchingConfig
    entry: LedgerEntry | None = None
    outcomes: dict[int, str] = field(default_factory=dict)
    batches: int = 2  # the rollouts' policies were made by these

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.joiner = Joiner(self.config, self.entry)
        self.joiner.drop_stale(self.batches)
        self.next_rollout = (self.entry.watermark if self.entry else 0) + 1
        self.next_event = max(1, self.entry.events_cursor if self.entry else 1)

    def feed_rollout(self) -> bool:
        later = [seq for seq in self.world.rollouts if seq >= self.next_rollout]
        if not later:
            return False
        seq = min(later)
        plan = self.world.rollouts[seq]
        if plan is None:
            self.joiner.unreadable(seq, "e", "no plan")
        else:
            self.joiner.member(seq, "e", plan, 0, 0)
        self.next_rollout = seq + 1
        return True

    def offer(self, event: int, item: GroupReward | TeacherPointer | DeadLetter) -> bool:
        match item:
            case GroupReward():
                return self.joiner.reward(event, 0, item)
            case TeacherPointer():
                return self.joiner.teacher(event, 0, item)
        return self.joiner.dead(event, 0, item)

    def feed_event(self) -> bool:
        later = [seq for seq in self.world.events if seq >= self.next_event]
        if not later:
            return False
        event = min(later)
        for item in self.world.events[event]:
            if not self.offer(event, item):
                while self.feed_rollout():
                    pass
                self.joiner.end_of_rollouts()
                assert self.offer(event, item)
        self.next_event = event + 1
        return True

    def commit(self, most: int) -> None:
        self.joiner.drop_stale(self.batches)
        batch = list(self.joiner.ready)[:most]
        for seq in batch:
            assert self.batches - self.joiner.ready[seq].policy_step <= self.config.max_staleness
        taken = self.joiner.take_outcomes(most)
        for member in taken:
            assert member.outcome
            assert member.seq not in self.outcomes, "a second outcome"
            self.outcomes[member.seq] = member.outcome.kind
        for member in self.joiner.record(batch):
            assert member.seq not in self.outcomes, "a second outcome"
            self.outcomes[member.seq] = "batched"
        self.batches += bool(batch)
        self.entry = make_entry(self.joiner)
        self.check()

    def check(self) -> None:
        """The entry says exactly which rollouts have an outcome, and its cursors skip nothing."""
        assert self.entry
        recorded = ResolvedSet(self.entry.watermark, self.entry.resolved)
        for seq in self.world.rollouts:
            if seq <= self.joiner.frontier:
                assert (seq in recorded) == (seq in self.outcomes)
            else:
                assert self.entry.watermark < seq
        if self.world.lies:
            return
        unresolved = {p.group for s, p in self.world.rollouts.items() if p and s not in self.outcomes}
        unresolved_seqs = {s for s, p in self.world.rollouts.items() if p and s not in self.outcomes}
        for event, items in self.world.events.items():
            for item in items:
                letter = isinstance(item, DeadLetter)
                target = item.seq if letter else item.group
                # a repeat of a settled group shares its id; what came for the first is not needed for it
                first = min((s for s, p in self.world.rollouts.items() if p and p.group == item.group), default=0)
                if (letter and target in unresolved_seqs and item.stage != "curriculum") or (
                    not letter and target in unresolved and first not in self.outcomes
                ):
                    assert self.entry.events_cursor <= event, "an annotation of an open group would be skipped"


def expected(world: World, config: BatchingConfig) -> dict[int, set[str] | None]:
    """What may become of each rollout, from the streams alone; None: nothing yet."""
    fates: dict[int, set[str] | None] = {}
    first: dict[str, int] = {}
    for seq, plan in sorted(world.rollouts.items()):
        if plan is None:
            fates[seq] = {"dead"}
        elif plan.group in first:
            fates[seq] = {"duplicate"}
        else:
            first[plan.group] = seq
            fates[seq] = {"oversized"} if plan.samples > config.batch_size else _fate(world, config, plan, seq)
    return fates


def _fate(world: World, config: BatchingConfig, plan: Plan, seq: int) -> set[str] | None:
    reward: GroupReward | None = None
    teacher: int | None = -1
    for _, items in sorted(world.events.items()):
        for item in items:
            if isinstance(item, GroupReward) and item.group == plan.group and reward is None:
                reward = item
            elif isinstance(item, TeacherPointer) and item.group == plan.group and teacher == -1:
                teacher = item.stored
            elif isinstance(item, DeadLetter) and item.seq == seq:
                if item.stage == "teacher" and teacher == -1:
                    teacher = None
                elif item.stage == "scorer" and reward is None:
                    return {"dead", "stale"}
    if reward is None:
        return None
    if reward.verdict != "trainable":
        return {reward.verdict, "stale"}
    if config.teacher == "off" or teacher not in (-1, None) or (config.teacher == "optional" and teacher is None):
        return {"batched", "stale"}
    return None if teacher == -1 else {"unscorable", "stale"}


@pytest.mark.slow
@settings(max_examples=400)
@given(
    worlds(),
    st.sampled_from(["off", "optional", "required"]),
    st.lists(st.sampled_from("rrreeecsb"), max_size=60),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_every_rollout_gets_exactly_one_outcome(world, teacher, script, most, rng) -> None:  # type: ignore[no-untyped-def]
    config = BatchingConfig(batch_size=8, max_staleness=3, teacher=teacher, teacher_deadline_s=None)
    writer = Writer(world, config)
    for action in script:
        match action:
            case "r":
                writer.feed_rollout()
            case "e":
                writer.feed_event()
            case "c":
                writer.commit(most)
            case "s":
                writer.start()  # what the life before had not committed is lost
            case "b":  # redelivery of what was handed out before
                writer.next_rollout = max(1, writer.next_rollout - rng.randint(0, 5))
                writer.next_event = max(1, writer.next_event - rng.randint(0, 5))
    while writer.feed_rollout() or writer.feed_event():
        pass
    for _ in range(30):
        writer.commit(most)
    assert set(writer.outcomes) <= set(world.rollouts)
    for seq, fate in expected(world, config).items():
        if world.lies:
            assert not {"duplicate", "oversized"} & (fate or set()) or writer.outcomes[seq] in (fate or set())
        elif fate is None:
            assert writer.outcomes.get(seq) in (None, "stale")
        else:
            assert writer.outcomes[seq] in fate


def test_interleavings_agree_on_the_outcome() -> None:
    plans = {1: make_plan(1), 2: make_plan(2), 3: make_plan(1)}
    events = {1: make_reward(1, 3, "zero_variance"), 2: make_reward(1, 1), 3: make_letter(2), 4: make_reward(2, 2)}
    for first in range(4):
        joiner = Joiner(CONFIG)
        for seq, plan in list(plans.items())[:first]:
            joiner.member(seq, "e", plan, 0, 0)
        for event, item in events.items():
            assert joiner.dead(event, 0, item) if isinstance(item, DeadLetter) else joiner.reward(event, 0, item)
        for seq, plan in plans.items():
            joiner.member(seq, "e", plan, 0, 0)
        assert outcomes(joiner) == {1: "zero_variance", 2: "dead", 3: "duplicate"}


def test_early_annotations_are_bounded_and_the_refused_one_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_module, "_MAX_PENDING", 3)
    joiner = Joiner(CONFIG)
    for n in range(1, 4):
        assert joiner.reward(10 + n, 0, make_reward(n, n))
    assert not joiner.reward(14, 0, make_reward(4, 4))
    assert joiner.waiting_for_members
    assert joiner.state().events_cursor == 11
    joiner.member(1, "e", make_plan(1), 0, 0)
    assert joiner.reward(14, 0, make_reward(4, 4))
    joiner.end_of_rollouts()
    assert not joiner.waiting_for_members
    assert joiner.state().events_cursor == 11  # group 1 is ready, not recorded
    joiner.record([1])
    assert joiner.state().events_cursor == 14


def test_a_group_whose_rewards_are_alike_is_trained_where_shaping_tells_its_samples_apart() -> None:
    joiner = Joiner(CONFIG)
    for n, shaping in ((1, [0.0, 0.05, 0.0, 0.05]), (2, [0.0] * 4), (3, [])):
        joiner.member(n, "e", make_plan(n), 0, 0)
        advantages = [-0.025, 0.025, -0.025, 0.025] if any(shaping) else [0.0] * 4
        reward = msgspec.structs.replace(make_reward(n, n, "zero_variance"), shaping=shaping, advantages=advantages)
        joiner.reward(n, 0, reward)
    assert joiner.ready[1].advantages == [-0.025, 0.025, -0.025, 0.025]
    assert outcomes(joiner) == {2: "zero_variance", 3: "zero_variance"}


def test_a_lie_about_the_sequence_does_not_displace_the_annotation_kept_for_the_group() -> None:
    joiner = Joiner(CONFIG)
    joiner.reward(1, 0, make_reward(7, 2))  # sequence 2 is another group
    joiner.reward(2, 0, make_reward(7, 5, "zero_variance"))
    joiner.member(2, "e", make_plan(2), 0, 0)
    joiner.member(5, "e", make_plan(7), 0, 0)
    assert outcomes(joiner) == {5: "zero_variance"}


def test_a_reward_that_names_a_settled_repeat_still_reaches_the_first_after_a_restart() -> None:
    joiner = Joiner(CONFIG)
    joiner.member(5, "e", make_plan(1), 0, 0)
    joiner.member(7, "e", make_plan(1), 0, 0)
    joiner.reward(3, 0, make_reward(1, 7))
    assert outcomes(joiner) == {7: "duplicate"}
    joiner = Joiner(CONFIG, make_entry(joiner))
    assert joiner.reward(3, 0, make_reward(1, 7))
    joiner.member(5, "e", make_plan(1), 0, 0)
    joiner.member(7, "e", make_plan(1), 0, 0)
    assert list(joiner.ready) == [5]
    assert outcomes(joiner) == {}


def test_an_early_reward_of_a_promoted_revision_does_not_count_for_the_copy_below_its_first() -> None:
    """A group is stored at 10 and again at 30, the run switched at 20, and after a restart rewards are read first."""
    joiner = Joiner(BatchingConfig(batch_size=4))
    assert joiner.reward(1, 0, make_reward(1, 30), 20)
    joiner.member(10, "e", make_plan(1), 0, 0)
    assert not joiner.ready
    joiner.reward(2, 0, make_reward(1, 10))
    assert list(joiner.ready) == [10]


def test_deadlines() -> None:
    config = BatchingConfig(batch_size=8, score_deadline_s=10.0, teacher="optional", teacher_deadline_s=5.0)
    joiner = Joiner(config)
    joiner.member(1, "e", make_plan(1), 0, SECOND)
    joiner.member(2, "e", make_plan(2), 0, SECOND)
    joiner.reward(1, 0, make_reward(2, 2))
    assert joiner.next_deadline_ns() == 6 * SECOND
    assert joiner.expire(5 * SECOND) == []
    assert list(joiner.ready) == []
    assert joiner.expire(6 * SECOND) == []
    assert list(joiner.ready) == [2]
    assert [member.seq for member in joiner.expire(11 * SECOND)] == [1]
    assert joiner.expire(99 * SECOND) == []  # once
    assert joiner.undecided == 1
    assert joiner.dead(2, 0, make_letter(1, "batcher", "deadline"))
    assert outcomes(joiner) == {1: "dead"}


def test_a_deadline_that_was_met_is_none() -> None:
    config = BatchingConfig(batch_size=8, score_deadline_s=20.0, teacher="optional", teacher_deadline_s=5.0)
    joiner = Joiner(config)
    for n in (1, 2, 3):
        joiner.member(n, "e", make_plan(n), 0, n * SECOND)
    joiner.teacher(1, 0, TeacherPointer(group=make_plan(1).group, seq=1, stored=1))
    joiner.reward(2, 0, make_reward(1, 1))
    assert joiner.next_deadline_ns() == 7 * SECOND, "of rollout 2: rollout 1 waits for nothing"
    joiner.teacher(3, 0, TeacherPointer(group=make_plan(2).group, seq=2, stored=2))
    joiner.dead(4, 0, make_letter(3, "scorer", "data"))
    assert joiner.next_deadline_ns() == 22 * SECOND, "of the reward of rollout 2; rollout 3 is dead"
    joiner.reward(5, 0, make_reward(2, 2))
    assert joiner.next_deadline_ns() is None
    assert joiner.expire(99 * SECOND) == []


def test_after_a_loss_whoever_waits_has_a_deadline_and_a_restart_reads_of_the_loss_again() -> None:
    config = BatchingConfig(batch_size=8, lost_deadline_s=5.0)
    joiner = Joiner(config)
    for seq, env in ((1, "e"), (2, "e"), (3, "other"), (4, "e")):
        joiner.member(seq, env, make_plan(seq), 0, SECOND)
    joiner.reward(6, 0, make_reward(2, 2))
    joiner.lost(7, "e", SECOND, ["score", "teacher"])
    joiner.lost(8, "e", 2 * SECOND, ["score"])  # a second loss does not put the first one off
    joiner.member(5, "e", make_plan(5), 0, SECOND)  # stored after both
    joiner.reward(9, 0, make_reward(4, 4))
    assert joiner.state().events_cursor == 6
    joiner.record([2, 4])
    assert joiner.state().events_cursor == 7
    again = Joiner(config, make_entry(joiner))
    assert joiner.expire(6 * SECOND - 1) == []
    assert [(member.seq, member.lost["score"]) for member in joiner.expire(6 * SECOND)] == [(1, 7)]
    assert joiner.expire(99 * SECOND) == []
    joiner.dead(10, 0, make_letter(1, "batcher", "deadline"))
    assert outcomes(joiner) == {1: "dead"}
    assert joiner.state().events_cursor == 10
    assert again.frontier == 0  # it is fed from the watermark on, and then from the cursor


def test_a_teacher_whose_answer_was_lost_is_not_waited_for() -> None:
    joiner = Joiner(BatchingConfig(batch_size=8, teacher="optional", teacher_deadline_s=None, lost_deadline_s=5.0))
    for seq in (1, 2):
        joiner.member(seq, "e", make_plan(seq), 0, 0)
    joiner.reward(1, 0, make_reward(1, 1))
    joiner.lost(2, "e", 0, ["teacher"])
    assert joiner.expire(5 * SECOND) == []
    assert list(joiner.ready) == [1]  # the other still waits for its reward, which is not lost
    joiner.reward(3, 0, make_reward(2, 2))
    assert list(joiner.ready) == [1, 2]


def test_a_required_teacher_that_stays_away_makes_the_group_unscorable() -> None:
    joiner = Joiner(BatchingConfig(batch_size=8, teacher="required", teacher_deadline_s=5.0))
    joiner.member(1, "e", make_plan(1), 0, 0)
    joiner.reward(1, 0, make_reward(1, 1))
    joiner.expire(5 * SECOND)
    assert outcomes(joiner) == {1: "unscorable"}


def test_a_reward_that_does_not_fit_its_group_is_never_trained_on() -> None:
    joiner = Joiner(CONFIG)
    joiner.member(1, "e", make_plan(1), 0, 0)
    joiner.reward(1, 0, make_reward(1, 1, samples=3))
    assert joiner.ready == {}
    assert outcomes(joiner) == {1: "unscorable"}


def test_staleness_settles_what_was_ready_and_what_was_not_scored() -> None:
    joiner = Joiner(CONFIG)
    joiner.drop_stale(4)
    joiner.member(1, "e", make_plan(1, step=3), 0, 0)
    joiner.member(2, "e", make_plan(2, step=3), 0, 0)
    joiner.member(3, "e", make_plan(3, step=4), 0, 0)
    joiner.reward(1, 0, make_reward(1, 1))
    joiner.drop_stale(4)
    assert outcomes(joiner) == {}
    joiner.drop_stale(5)
    assert joiner.ready == {}
    assert outcomes(joiner) == {1: "stale", 2: "stale"}


@pytest.mark.parametrize(("staleness_of", "kept"), [("newest", [1]), ("oldest", [])])
def test_a_rollout_over_which_weights_arrived_is_as_old_as_the_setting_says(
    staleness_of: Literal["newest", "oldest"], kept: list[int]
) -> None:
    joiner = Joiner(msgspec.structs.replace(CONFIG, staleness_of=staleness_of))
    joiner.drop_stale(7)
    joiner.member(1, "e", msgspec.structs.replace(make_plan(1, step=2), newest_step=6), 0, 0)
    joiner.member(2, "e", msgspec.structs.replace(make_plan(2, step=2), newest_step=5), 0, 0)
    for n in (1, 2):
        joiner.reward(n, 0, make_reward(n, n))
    assert list(joiner.ready) == kept
    assert [joiner.ready[seq].newest_step for seq in kept] == [6] * len(kept)
    assert outcomes(joiner) == dict.fromkeys({1, 2} - set(kept), "stale")


def test_a_slow_rollout_is_not_taken_for_a_repeat_however_many_pass_it() -> None:
    """More than a thousand gaps lie above it, which other rollouts may fill any day."""
    joiner = Joiner(CONFIG)
    slow = 2
    for n in [0, slow, *range(4, 4_004, 2), *range(20_000, 24_000, 2)]:
        joiner.member(joiner.frontier + 1, "e", make_plan(n), 0, 0)
        if n != slow:
            joiner.reward(joiner.frontier, 0, make_reward(n, joiner.frontier, "zero_variance"))
            joiner.take_outcomes(1)
    entry = make_entry(joiner)
    (mark,) = entry.producers.values()
    assert len(mark.seen) > 2 * 1024  # the slow one keeps them
    again = Joiner(CONFIG, entry)
    for seq in range(entry.watermark + 1, joiner.frontier + 1):
        n = slow if seq == entry.watermark + 1 else 99_999
        again.member(seq, "e", make_plan(n), 0, 0)
    again.member(joiner.frontier + 1, "e", make_plan(20_000), 0, 0)
    assert outcomes(again) == {joiner.frontier + 1: "duplicate"}
    assert again.undecided == 1


def test_tokens_make_a_group_oversized_too() -> None:
    joiner = Joiner(BatchingConfig(batch_size=8, token_budget=39))
    joiner.member(1, "e", make_plan(1), 0, 0)
    assert outcomes(joiner) == {1: "oversized"}


def test_a_rollout_without_logprobs_is_never_trained_on() -> None:
    joiner = Joiner(CONFIG)
    joiner.member(1, "e", msgspec.structs.replace(make_plan(1), trainable=False), 0, 0)
    joiner.reward(1, 0, make_reward(1, 1))
    assert outcomes(joiner) == {1: "untrainable"}
    assert not joiner.ready


def test_another_stages_dead_letter_ends_nothing() -> None:
    joiner = Joiner(CONFIG)
    joiner.member(1, "e", make_plan(1), 0, 0)
    joiner.dead(1, 0, make_letter(1, "my-statistics"))
    joiner.dead(2, 0, make_letter(1, "scorer", stream="EVENTS"))
    assert outcomes(joiner) == {}
    assert joiner.undecided == 1


def test_a_policy_that_cannot_exist_yet_ends_the_rollout_and_one_just_trained_does_not() -> None:
    joiner = Joiner(CONFIG)
    joiner.drop_stale(3)
    joiner.member(1, "e", make_plan(1, step=3), 0, 0)
    for seq, step in ((2, 4), (3, 10**18)):
        joiner.member(seq, "e", make_plan(seq, step=step), 0, 0)
        joiner.reward(seq, 0, make_reward(seq, seq))
    joiner.member(4, "e", msgspec.structs.replace(make_plan(4, step=3), newest_step=4), 0, 0)
    joiner.reward(4, 0, make_reward(1, 1))
    assert list(joiner.ready) == [1]
    first, *others = [member.outcome for member in joiner.take_outcomes(10)]
    assert [one.kind for one in (first, *others) if one] == ["dead"] * 3
    assert "policy step 4, which cannot be: 3 batches" in str(first)


# quarantine


def test_a_quarantine_settles_what_is_open_and_what_comes_from_a_sequence_on() -> None:
    joiner = Joiner(CONFIG)
    for seq in (1, 2, 3):
        joiner.member(seq, "e", make_plan(seq), 0, 0)
        joiner.reward(seq, 0, make_reward(seq, seq))
    joiner.member(4, "other", make_plan(4), 0, 0)
    joiner.quarantine("e", EnvironmentStanding(quarantined_from=2, cause="hacked"))
    assert sorted(joiner.ready) == [1]
    joiner.member(5, "e", make_plan(5), 0, 0)
    joiner.reward(5, 0, make_reward(5, 5))
    assert outcomes(joiner) == {2: "quarantined", 3: "quarantined", 5: "quarantined"}
    assert joiner.undecided == 1  # the other environment's
    joiner.quarantine("e", EnvironmentStanding(diverted=[RolloutRange(first=2, last=6, cause="hacked")]))
    for seq in (6, 7):  # the first was stored before the quarantine was lifted, and is seen after
        joiner.member(seq, "e", make_plan(seq), 0, 0)
        joiner.reward(seq, 0, make_reward(seq, seq))
    assert sorted(joiner.ready) == [1, 7]
    assert outcomes(joiner) == {6: "quarantined"}


def test_a_dead_letter_of_another_group_at_the_same_sequence_ends_nothing() -> None:
    """The server lost that group, and another was stored in its place."""
    joiner = Joiner(BatchingConfig(batch_size=8))
    joiner.member(1, "e", make_plan(1), 0, 0)
    of_another = make_letter(1).replace(group=make_plan(2).group)
    assert joiner.dead(1, 0, of_another)
    assert joiner.dead(2, 0, make_letter(2).replace(group=make_plan(3).group))  # before its rollout is seen
    joiner.member(2, "e", make_plan(2), 0, 0)
    assert joiner.unrecorded_outcomes == 0
    assert joiner.dead(3, 0, make_letter(1).replace(group=make_plan(1).group))
    assert joiner.unrecorded_outcomes == 1
