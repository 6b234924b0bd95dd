"""The floor: over random histories, a reader that starts again finds all it reads, and nothing else is kept.

A model of the run's readers, each written down as what it reads when it starts, not as the claim it makes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.batcher.join import Joiner
from lachesis.pipeline.ledger.chain import Chain, make_batch
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.logic.normalizer import EnvNormalizer
from lachesis.pipeline.retention import retention_floor
from lachesis.pipeline.retention.retention_floor import (
    RetentionClaim,
    RetentionInputs,
    StageProgress,
    UntrainedReferences,
)
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, GroupReward, TeacherPointer
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.planning_header import Plan
from lachesis.schemas.retention import Hold
from lachesis.schemas.subjects import EVENTS, ROLLOUTS, TEACHER

ENVS = ("a", "b")
BATCHING = BatchingConfig(batch_size=4, max_staleness=1000, teacher="required")
NORMALIZATION = NormalizationConfig(window=3, history=4)


@dataclass
class World:
    """The streams as lists of (sequence, subject, what), and the readers' durable states."""

    rng: random.Random
    streams: dict[str, list[tuple[int, str, object]]] = field(
        default_factory=lambda: {ROLLOUTS: [], EVENTS: [], TEACHER: []}
    )
    lasts: dict[str, int] = field(default_factory=lambda: {ROLLOUTS: 0, EVENTS: 0, TEACHER: 0})
    entry: LedgerEntry | None = None
    entries: list[LedgerEntry] = field(default_factory=list)
    reported: int = -1
    untrained: UntrainedReferences = field(default_factory=UntrainedReferences)
    unscored: dict[int, tuple[str, Plan]] = field(default_factory=dict)
    untaught: dict[int, tuple[str, Plan]] = field(default_factory=dict)
    commits: dict[str, StageProgress] = field(default_factory=lambda: dict.fromkeys(ENVS, StageProgress()))
    deltas: dict[str, list[tuple[int, dict]]] = field(default_factory=lambda: {env: [] for env in ENVS})
    snapshots: dict[str, dict | None] = field(default_factory=lambda: dict.fromkeys(ENVS))
    curricula: dict[str, StageProgress] = field(default_factory=lambda: dict.fromkeys(ENVS, StageProgress()))
    learned: dict[str, list[int]] = field(default_factory=lambda: {env: [] for env in ENVS})

    def put(self, stream: str, subject: str, what: object) -> int:
        self.lasts[stream] += self.rng.randint(1, 2)  # other runs store here too
        self.streams[stream].append((self.lasts[stream], subject, what))
        return self.lasts[stream]

    def read(self, stream: str, subject: str, start: int = 1) -> list[tuple[int, object]]:
        return [(seq, what) for seq, at, what in self.streams[stream] if at == subject and seq >= start]

    # what happens in a run

    def publish(self) -> None:
        env = self.rng.choice(ENVS)
        n = self.lasts[ROLLOUTS] + 1
        plan = Plan(
            group=f"{n:032x}",
            sequences=2,
            samples=2,
            tokens=4,
            policy_step=0,
            producer=env,
            epoch=1,
            counter=n,
            started_ns=1,
        )
        seq = self.put(ROLLOUTS, subjects.rollout("r", env), plan)
        self.unscored[seq] = self.untaught[seq] = (env, plan)

    def _next(self, waiting: dict[int, tuple[str, Plan]]) -> tuple[int, str, Plan] | None:
        """Take one of the first that a durable consumer has not acknowledged: it must still be there."""
        if not waiting:
            return None
        seq = self.rng.choice(list(waiting)[:4])
        env, plan = waiting.pop(seq)
        found = self.read(ROLLOUTS, subjects.rollout("r", env), seq)
        assert found[:1] == [(seq, plan)], "not handled yet, and gone"
        return seq, env, plan

    def score(self) -> None:
        found = self._next(self.unscored)
        if found is not None:
            seq, env, plan = found
            self.put(EVENTS, subjects.event("score", "r", "live", env), (plan.group, seq))

    def teach(self) -> None:
        found = self._next(self.untaught)
        if found is not None:
            seq, env, plan = found
            stored = self.put(TEACHER, subjects.logprobs("r", "live", env), seq)
            pointer = TeacherPointer(group=plan.group, seq=seq, stored=stored)
            self.put(EVENTS, subjects.event("teacher", "r", "live", env), pointer)

    def bury(self) -> None:
        """A deadline passes; the scorer may still come to it."""
        if self.unscored:
            seq, (env, plan) = next(iter(self.unscored.items()))
            letter = DeadLetter(
                leased=True,
                run="r", env=env, revision="live", stage="batcher", kind="deadline", stream=ROLLOUTS, seq=seq,
                group=plan.group, reason="late", place="p", time_ns=1,
            )  # fmt: skip
            self.put(EVENTS, subjects.event("dead", "r", "live", env), letter)

    def normalizer(self, env: str) -> EnvNormalizer:
        """Start it: the last snapshot, the commits behind it, and then what it reads from its cursors on."""
        it = EnvNormalizer(env, NORMALIZATION)
        committed = self.commits[env]
        if self.snapshots[env] is not None:
            it.load_state_dict(self.snapshots[env])
        stored = dict(self.read(EVENTS, subjects.event("reward", "r", "live", env)))
        for seq, delta in self.deltas[env]:
            if seq > committed.covers:
                assert seq in stored, "a commit behind the last snapshot is gone"
                it.apply(delta)
        for seq, plan in self.read(ROLLOUTS, subjects.rollout("r", env), committed.cursors.get(ROLLOUTS, 1)):
            it.member(seq, plan.group)
        for source, what in self.outcomes(env):
            if isinstance(what, DeadLetter):
                it.resolve(what.group, what.seq, None, source=source)
            else:
                it.resolve(*what, {"score": [0.0, 1.0]}, source=source)
        return it

    def outcomes(self, env: str) -> list[tuple[int, object]]:
        cursor = self.commits[env].cursors.get(EVENTS, 1)
        return self.events(("score", "dead"), [env], cursor)

    def events(self, kinds: Sequence[str], envs: Sequence[str], start: int) -> list[tuple[int, object]]:
        names = [subjects.event(kind, "r", "live", env) for env in envs for kind in kinds]
        return sorted((item for name in names for item in self.read(EVENTS, name, start)), key=lambda item: item[0])

    def normalize(self) -> None:
        env = self.rng.choice(ENVS)
        it = self.normalizer(env)
        outcomes = self.outcomes(env)
        step = it.step()
        if step.delta is None:
            return
        oldest = it.oldest_source()
        read = outcomes[-1][0] + 1 if outcomes else self.commits[env].cursors.get(EVENTS, 1)
        cursors = {ROLLOUTS: it.watermark, EVENTS: oldest if oldest is not None else read}
        reward = subjects.event("reward", "r", "live", env)
        seq = self.put(EVENTS, reward, [(ready.group, ready.seq) for ready in step.ready])
        self.deltas[env].append((seq, step.delta))
        covers = self.commits[env].covers
        if self.rng.random() < 0.3:
            self.snapshots[env], covers = it.state_dict(), seq
        self.commits[env] = StageProgress(cursors, covers)

    def batcher(self) -> Joiner:
        """Start it: the last entry, and then what it reads from there on."""
        it = Joiner(BATCHING, self.entry)
        start, cursor = it.frontier + 1, max(1, self.entry.events_cursor if self.entry else 1)
        members = sorted(item for env in ENVS for item in self.read(ROLLOUTS, subjects.rollout("r", env), start))
        for seq, plan in members:
            it.member(seq, plan.producer, plan, 1, 1)
        for at, what in self.events(("reward", "teacher", "dead"), ENVS, cursor):
            if isinstance(what, TeacherPointer):
                assert it.teacher(at, 1, what)
            elif isinstance(what, DeadLetter):
                assert it.dead(at, 1, what)
            else:
                for group, seq in what:
                    assert it.reward(at, 1, reward(group, seq))
        return it

    def batch(self) -> None:
        it = self.batcher()
        refs = self.rng.sample(list(it.ready.values()), 2) if len(it.ready) >= 2 else []
        if not refs and not it.unrecorded_outcomes:
            return
        chain = Chain("r", "main", "t", self.entry)
        settled = [member.outcome for member in it.take_outcomes(100)]
        it.record(ref.seq for ref in refs)
        batch = make_batch(chain.next_batch, refs, 4) if refs else None
        self.entry = chain.extend(it.state(), batch=batch, outcomes=settled, stamps={}, written_ns=1)
        self.entries.append(self.entry)
        self.untrained.record_entry(self.entry)

    def report(self) -> None:
        if self.entry is not None and self.entry.index > self.reported:
            self.reported = self.rng.randint(self.reported + 1, self.entry.index)
            self.untrained.record_report(
                TrainReport(
                    run="r", trainer="main", lineage="a", term="t", step=1, ledger_index=self.reported, chain="c",
                    next_batch=1, policy_version="1-a-b", checkpoint="c",
                )
            )  # fmt: skip

    def learn(self) -> None:
        env = self.rng.choice(ENVS)
        rewards = self.read(
            EVENTS, subjects.event("reward", "r", "live", env), self.curricula[env].cursors.get(EVENTS, 1)
        )
        stored = [seq for seq, _ in self.read(EVENTS, subjects.event("curriculum", "r", "live", env))]
        behind = [seq for seq in self.learned[env] if seq > self.curricula[env].covers]
        assert set(behind) <= set(stored), "a commit behind the last snapshot is gone"
        if rewards:
            seq = self.put(EVENTS, subjects.event("curriculum", "r", "live", env), None)
            self.learned[env].append(seq)
            covers = seq if self.rng.random() < 0.3 else self.curricula[env].covers
            self.curricula[env] = StageProgress({EVENTS: rewards[0][0] + 1}, covers)

    # trimming

    def facts(self) -> RetentionInputs:
        watermark = self.entry.watermark if self.entry else 0
        unsettled = [seq for seq, _, rollout in self.streams[TEACHER] if rollout > watermark]
        return RetentionInputs(
            watermark=watermark,
            events_cursor=self.entry.events_cursor if self.entry else 0,
            acknowledged={
                "scorer": min(self.unscored, default=self.lasts[ROLLOUTS] + 1) - 1,
                "teacher": min(self.untaught, default=self.lasts[ROLLOUTS] + 1) - 1,
            },
            normalizers=self.commits,
            curricula=self.curricula,
            monitors=None,
            batched=self.untrained.lowest_seqs(),
            logprobs=min(unsettled, default=self.lasts[TEACHER] + 1),
        )

    def trim(self) -> int:
        """Delete all that the floor lets go; return how much that was."""
        claims = retention_floor.claims(self.facts(), "r", "live", ENVS)
        gone = 0
        for stream, messages in self.streams.items():
            lasts = {subject: seq for seq, subject, _ in messages}
            kept = [
                (seq, subject, what)
                for seq, subject, what in messages
                if seq >= retention_floor.claims_on(claims, stream, subject)[0].needs or seq == lasts[subject]
            ]
            gone += len(messages) - len(kept)
            self.streams[stream] = kept
        return gone


def reward(group: str, seq: int) -> GroupReward:
    return GroupReward(
        group=group, seq=seq, item="i", policy_step=0, verdict="trainable", scores=[0.0, 1.0], rewards=[0.0, 1.0],
        advantages=[-1.0, 1.0], snapshot="s", mean=0.5, std=0.5, range=1.0, n_valid=2,
    )  # fmt: skip


def ended(world: World) -> tuple[object, ...]:
    """All that the run has come to."""
    return world.entries, world.deltas, world.commits, world.lasts


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(50, 300))
def test_a_run_that_is_trimmed_at_any_moment_comes_to_the_same(seed: int, steps: int) -> None:
    """Every step starts its reader again from what is stored: what it does not find shows in what it writes."""
    trimmed, whole = World(random.Random(seed)), World(random.Random(seed))
    actions = (
        "publish", "publish", "score", "score", "teach", "teach", "bury", "normalize", "normalize", "batch", "batch",
        "report", "learn",
    )  # fmt: skip
    order, cuts = random.Random(seed + 1), random.Random(seed + 2)
    for _ in range(steps):
        action = order.choice(actions)
        for world in (trimmed, whole):
            getattr(world, action)()
        if cuts.random() < 0.3:
            trimmed.trim()
        for entry in trimmed.entries:
            if entry.index > trimmed.reported and entry.batch is not None:
                stored = {seq for stream in (ROLLOUTS,) for seq, _, _ in trimmed.streams[stream]}
                arrays = {seq for seq, _, _ in trimmed.streams[TEACHER]}
                assert {ref.seq for ref in entry.batch.groups} <= stored
                assert {ref.teacher for ref in entry.batch.groups if ref.teacher} <= arrays
    assert ended(trimmed) == ended(whole)


def test_what_nobody_needs_goes() -> None:
    world = World(random.Random(3))
    for _ in range(60):
        for action in ("publish", "score", "teach", "normalize", "batch", "report", "learn"):
            getattr(world, action)()
    before = sum(map(len, world.streams.values()))
    assert world.trim() > before / 2


def test_a_hold_claims_its_streams_and_an_unknown_reader_everything() -> None:
    held = retention_floor.hold_claims({"replay": Hold(needs={ROLLOUTS: 7}, expires_ns=1, about="v2")})
    assert held == [RetentionClaim(ROLLOUTS, ">", 7, "replay (v2)")]
    nothing_known = retention_floor.claims(RetentionInputs(acknowledged={"scorer": 0}), "r", "live", ENVS)
    for stream in (ROLLOUTS, EVENTS, TEACHER):
        for subject in retention_floor.trimmable(stream, "r", "live", ENVS):
            assert retention_floor.claims_on([*nothing_known, *held], stream, subject)[0].needs <= 1
    assert retention_floor.trimmable(subjects.LEDGER, "r", "live", ENVS) == []


def test_the_health_service_claims_what_it_has_not_judged_and_its_commits_behind_the_last_snapshot() -> None:
    facts = RetentionInputs(monitors={"a": StageProgress({EVENTS: 50, "LEDGER": 3}, 40)})
    claimed = [
        claim for claim in retention_floor.claims(facts, "r", "live", ["a"]) if claim.holder.startswith("health")
    ]
    assert {(claim.subject, claim.needs) for claim in claimed} == {
        ("rl.score.r.live.a", 50),
        ("rl.dead.r.live.a", 50),
        ("rl.reward.r.live.a", 50),
        ("rl.alert.r.live.a", 41),
    }
    without = retention_floor.claims(RetentionInputs(monitors=None), "r", "live", ["a"])
    assert not [claim for claim in without if "health" in claim.holder]
    for subject in retention_floor.trimmable(
        EVENTS, "r", "live", ["a"]
    ):  # each has a claim, or the trimmer could not tell
        assert retention_floor.claims_on(without, EVENTS, subject)


def test_alerts_that_the_webhook_has_not_taken_stay() -> None:
    facts = RetentionInputs(monitors={"a": StageProgress({EVENTS: 50}, 40)}, webhook=20)
    claimed = retention_floor.claims(facts, "r", "live", ["a"])
    assert retention_floor.claims_on(claimed, EVENTS, "rl.alert.r.live.a")[0].needs == 21
