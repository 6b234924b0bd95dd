"""Normalizers of revisions: each is as one of its rollouts alone would be, whatever comes first, and killed at will."""

import itertools
import random

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.config.shaping import RewardConfig
from lachesis.pipeline.normalizer.logic.normalizer import EnvNormalizer
from lachesis.pipeline.normalizer.logic.revision_normalizers import RevisionNormalizers, RewardTerms
from lachesis.pipeline.normalizer.logic.reward import RewardRule
from lachesis.schemas.errors import DataError

OWN = NormalizationConfig(window=4, warmup_groups=1, warmup_samples=2)
NEW = NormalizationConfig(window=3, warmup_groups=2, warmup_samples=2, mode="zscore")
NEWER = NormalizationConfig(window=5, warmup_groups=0, warmup_samples=2)


def terms(config: NormalizationConfig) -> RewardTerms:
    return RewardTerms(config, RewardRule(AdvantageConfig(), RewardConfig()))


class Log:
    """What a stage commits, and what a start makes of it. `learned` are the promotions that a start finds."""

    def __init__(self, own: NormalizationConfig, promotions: dict[int, NormalizationConfig]) -> None:
        self.own = own
        self.promotions = promotions
        self.learned: dict[int, NormalizationConfig] = {}
        self.state, self.deltas, self.out = None, [], {}
        self.rollouts = self.events = 1
        self.start()

    def start(self) -> None:
        self.now = RevisionNormalizers("e", terms(self.own))
        self.now.restore(
            msgspec.msgpack.decode(self.state) if self.state else None,
            [msgspec.msgpack.decode(delta) for delta in self.deltas],
            {first: terms(config) for first, config in self.learned.items()},
        )
        assert self.learned or self.rollouts == self.now.watermark
        self.next = {"rollouts": self.rollouts, "events": self.events}

    def learn(self, first: int) -> None:
        if not self.now.is_known(first):
            self.learned = {at: config for at, config in self.promotions.items() if at <= first}
            for at, config in self.learned.items():
                self.now.promote(at, terms(config))

    def commit(self, *, snapshot: bool) -> None:
        while (change := self.now.step()) is not None:
            for item in change.ready:
                values = change.of.normalizer and item.snapshot.normalize("score", item.values["score"])
                assert item.seq not in self.out, "handed out twice"
                self.out[item.seq] = (change.of.promoted, list(values), item.snapshot.id)
            self.deltas.append(change.delta)
            oldest = self.now.oldest_source()
            self.rollouts = max(self.rollouts, self.now.watermark)
            self.events = self.next["events"] if oldest is None else oldest
            self.now.forget_done()
            if snapshot:
                self.state, self.deltas = self.now.state(), []


def alone(first: int, last: int, config: NormalizationConfig, scores: dict[int, list[float] | None]) -> dict:
    """What a replay of the rollouts from `first` to `last` gives."""
    one = EnvNormalizer("e", config)
    for seq in range(first, last + 1):
        one.member(seq, f"g{seq}")
        one.resolve(f"g{seq}", seq, None if scores[seq] is None else {"score": scores[seq]}, source=seq)
    out = {}
    while (step := one.step()).delta is not None:
        for item in step.ready:
            out[item.seq] = (list(item.snapshot.normalize("score", item.values["score"])), item.snapshot.id)
    return out


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
@example(416, True)
@example(705, True)
@example(116, True)
@example(2877899196, True)
@example(3180000070, True)
def test_each_is_a_replay_of_its_own_rollouts(seed, long):
    """`long`: with a stretch of dead rollouts behind a switch, longer than windows are remembered, and restarts that
    find promotions before any score tells of them."""
    draw, count = random.Random(seed), 150 if long else 30
    firsts = sorted(draw.sample(range(2, 60 if long else count + 1), draw.choice([1, 2])))
    promotions = dict(zip(firsts, (NEW, NEWER), strict=False))
    dead_from = draw.choice(firsts)
    dead_to = dead_from + (draw.choice([0, 20, 90]) if long else 0)
    scores = {
        seq: [float(draw.randrange(4)), draw.uniform(-5, 5)]
        if draw.random() < 0.8 and not dead_from <= seq < dead_to
        else None
        for seq in range(1, count + 1)
    }
    bounds = [1, *firsts, count + 1]

    def promoted(seq: int) -> int | None:
        return max((first for first in firsts if first <= seq), default=None)

    late = draw.choice([1, 3, count])
    order = sorted(range(1, count + 1), key=lambda seq: seq + draw.uniform(0, late))
    if long and draw.random() < 0.5:  # the one before the first switch holds up what is behind it
        order.sort(key=lambda seq: seq == firsts[0] - 1)
    log = Log(OWN, promotions)
    while log.next["rollouts"] <= count or log.next["events"] <= count:
        kills = 0.05 if long else 1
        what = draw.choices(["rollouts", "events", "commit", "snapshot", "kill"], [8, 8, 3, 1, kills])[0]
        if what in ("commit", "snapshot"):
            log.commit(snapshot=what == "snapshot")
        elif what == "kill":
            if long and log.next["rollouts"] > firsts[-1] + 3:
                log.learned = dict(promotions)
            log.start()
        elif log.next[what] <= count:
            at = log.next[what]
            log.next[what] += 1
            if what == "rollouts":
                log.now.member(at, f"g{at}")
                continue
            seq = order[at - 1]
            values = None if scores[seq] is None else {"score": scores[seq]}
            by = promoted(seq)
            if values is not None and by is not None:
                log.learn(by)
            log.now.resolve(f"g{seq}", seq, values, source=at, promoted=by)
    log.commit(snapshot=False)
    for low, high in itertools.pairwise(bounds):
        config = promotions.get(low, OWN)
        expected = alone(low, high - 1, config, scores)
        found = {seq: out for seq, out in log.out.items() if low <= seq < high}
        assert found == {seq: (promoted(seq), *out) for seq, out in expected.items()}


@pytest.mark.parametrize("snapshot_at", [4, 8, None])
def test_a_start_with_nothing_left_to_read_has_the_state_of_one_pass(snapshot_at):
    """The rollouts up to 8 fill the windows of both revisions, so that a start finds all folded."""
    log = Log(OWN, {5: NEW})
    for seq in range(1, 11):
        log.now.member(seq, f"g{seq}")
    for seq in range(1, 11):
        by = 5 if seq >= 5 else None
        if by is not None:
            log.learn(by)
        log.now.resolve(f"g{seq}", seq, {"score": [0.0, 1.0]}, source=seq, promoted=by)
        log.next = {"rollouts": seq + 1, "events": seq + 1}
        log.commit(snapshot=seq == snapshot_at)
    in_one_pass = log.now.state()
    log.start()
    assert log.now.state() == in_one_pass


def test_a_run_that_was_never_switched_keeps_its_form():
    own, plain = RevisionNormalizers("e", terms(OWN)), EnvNormalizer("e", OWN)
    for one in (own, plain):
        for seq in range(1, 12):
            one.member(seq, f"g{seq}")
            one.resolve(f"g{seq}", seq, {"score": [1.0, float(seq)]}, source=seq)
    change, step = own.step(), plain.step()
    assert change is not None
    assert change.delta == msgspec.msgpack.encode(step.delta)
    assert own.state() == msgspec.msgpack.encode(plain.state_dict())


@pytest.mark.parametrize("by", [None, 3])
def test_scores_of_a_revision_that_does_not_judge_a_rollout_are_refused_while_it_waits(by):
    now = RevisionNormalizers("e", terms(OWN))
    now.promote(3, terms(NEW))
    for seq in (1, 2, 3, 4):
        now.member(seq, f"g{seq}")
        judge = None if seq < 3 else 3
        scores = {"score": [1.0, 2.0]}
        if by == judge:
            now.resolve(f"g{seq}", seq, scores, source=seq, promoted=by)
            now.resolve(f"g{seq}", seq, scores, source=9, promoted=None if by else 3)  # too late to count
        else:
            with pytest.raises(DataError, match=f"group g{seq}: scored by the"):
                now.resolve(f"g{seq}", seq, scores, source=seq, promoted=by)
    with pytest.raises(DataError):  # before its membership is read
        now.resolve("g9", 9, {"score": [1.0]}, source=9)
    now.resolve("g8", 8, {"score": [1.0]}, source=10, promoted=3)
    now.resolve("g8", 8, {"score": [1.0]}, source=11)
    handed = []
    while (change := now.step()) is not None:
        handed += [item.seq for item in change.ready]
    assert handed == ([1, 2] if by is None else [3, 4])
    assert [seq for seq, _ in now.unresolved(4)] == ([3, 4] if by is None else [1, 2])
