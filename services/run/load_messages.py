"""Measures the messages that a group causes: it is encoded with all that stages derive from it.

Nothing here is a constant: random tokens and logprobs, and text of random words, go through the codec of the wire and
the logic of scorer, normalizer, batcher, curriculum and health. What a server adds to store a message is counted.
"""

import math
import random
import zlib
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.batcher.entry_former import EntryFormer
from lachesis.pipeline.batcher.join import Joiner
from lachesis.pipeline.bus.blobs import CHUNK_BYTES, INLINE_BYTES
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.curriculum.logic.learner import NamedItemLearner
from lachesis.pipeline.curriculum.stage import GATHER_S
from lachesis.pipeline.health.logic.monitor import EnvMonitor
from lachesis.pipeline.ledger.chain import PREVIOUS_HEADER, Chain
from lachesis.pipeline.normalizer.logic.revision_normalizers import RevisionNormalizers, RewardTerms
from lachesis.pipeline.normalizer.logic.reward import RewardRule
from lachesis.pipeline.runtime.commitlog import MAX_COMMITS_SINCE_SNAPSHOT, SNAPSHOT_EVERY
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.pipeline.scorer.logic.aggregate import Ensemble, EnsembleMember
from lachesis.pipeline.scorer.logic.excerpts import excerpts_of
from lachesis.pipeline.scorer.logic.signals import signals_of
from lachesis.pipeline.scorer.rater import Rating
from lachesis.schemas import subjects
from lachesis.schemas.alerts import AlertEvent
from lachesis.schemas.annotations import (
    Commit,
    CurriculumEvent,
    GroupReward,
    GroupScore,
    RewardEvent,
    ScoreEvent,
    Stamp,
    StreamMark,
    TeacherEvent,
    TeacherLogprobs,
    TeacherPointer,
)
from lachesis.schemas.codec import Event, encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.planning_header import PLAN_HEADER, ROLLOUT_HEADER, TRACEPARENT_HEADER, Plan, traceparent
from lachesis.schemas.rollout import Message, RolloutGroup, Sequences, VersionSpan

__all__ = ["GroupShape", "MessageSize", "make_group", "measure_messages", "rollout_bytes"]

_ENV, _TRAINER, _RUN = "environment", "main", "run"
_NOW_NS = 1_800_000_000_000_000_000
_GROUPS = 1024
"""Groups that the stages are fed, so that what they remember has a size; what health remembers grows on slowly."""
_ITEMS = 512
"""Different tasks of them."""
_VOCABULARY = 150_000
_PROMPT_TOKENS = 200
_WORDS_PER_TOKEN = 5 / 8
_RECORD_BYTES, _RECORD_HEADER_BYTES = 30, 4
"""What nats-server's file store adds to a message, and to one with headers."""
_COMMIT_HEADERS = {
    "Nats-Msg-Id": "commit." + "0" * 32,
    "Nats-Expected-Last-Subject-Sequence": "1000000",
    "Nats-Expected-Stream": "lachesis_run_EVENTS",
}
"""Headers of a fenced message, of about the length that they have."""
Positive = Annotated[int, Meta(ge=1)]


class GroupShape(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of `samples` x `tokens` tokens, rated by `raters`, in batches of `batch_groups` groups.

    `raters` 0: the environment scores its groups itself. `teacher_top_k`: likeliest tokens that a teacher stores at
    each position; None: there is no teacher.
    """

    samples: Positive
    tokens: Positive
    raters: Annotated[int, Meta(ge=0)] = 1
    teacher_top_k: Annotated[int, Meta(ge=0, le=100)] | None = None
    batch_groups: Positive = 16

    def __str__(self) -> str:
        return f"{self.samples}x{self.tokens}"


class MessageSize(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of message: the bytes that it takes in a stream, and how many of them a group causes.

    `header` are the bytes without the payload, which is all that some readers are sent. `lasts`: it stays for the
    retention; else the next of its kind replaces it.
    """

    kind: str
    stream: str
    size: float
    header: int
    per_group: float
    lasts: bool = True


def measure_messages(
    shape: GroupShape, config: RunConfig, env_groups_per_s: float, *, history: int = _GROUPS
) -> list[MessageSize]:
    """Return all messages that groups of this shape cause, at so many a second in an environment.

    Scores and rewards are taken to travel one group a message, as they do until a stage is busy. What stages remember,
    which some messages hold, is that of `history` groups.
    """
    group = make_group(shape)
    stages = _Stages(shape, config, group, max(1, min(history, round(GATHER_S * env_groups_per_s))))
    for number in range(history):
        stages.feed(number)
    return [_rollout(group), *stages.sizes(history), *_teacher(shape, group)]


def make_group(shape: GroupShape) -> RolloutGroup:
    """Return a group of random tokens with logprobs, and text of random words, five for eight tokens."""
    draw = np.random.default_rng(0)
    samples, tokens = shape.samples, shape.tokens
    prompt = min(_PROMPT_TOKENS, tokens // 4)
    mask = np.arange(samples * tokens) % tokens >= prompt
    words = ["".join(chr(97 + letter) for letter in draw.integers(0, 26, n)) for n in draw.integers(2, 9, 3000)]
    texts = [" ".join(draw.choice(words, max(1, int(tokens * _WORDS_PER_TOKEN)))) for _ in range(samples)]
    return RolloutGroup(
        id=new_group_id(), run=_RUN, env=_ENV, item="item-1", producer="environment-1", epoch=1, counter=1,
        policy_versions=["0-first-ab"], tokenizer_hash="0" * 32, started_ns=_NOW_NS, lease="0" * 32,
        messages=[[Message(role="user", content="?"), Message(role="assistant", content=text)] for text in texts],
        sequences=Sequences(
            offsets=as_bytes(np.arange(samples + 1) * tokens, "int32"),
            tokens=as_bytes(draw.integers(0, _VOCABULARY, len(mask)), "int32"),
            loss_mask=pack_mask(mask),
            logprobs=as_bytes(np.where(mask, -draw.exponential(1.0, len(mask)), 0.0), "float32"),
            finish_reasons=["stop"] * samples,
            version_spans=[VersionSpan(i, 0, 0) for i in range(samples)],
        ),
    )  # fmt: skip


def rollout_bytes(shape: GroupShape) -> float:
    """Return the bytes that a rollout of this shape takes in its stream."""
    return _rollout(make_group(shape)).size


def _rollout(group: RolloutGroup) -> MessageSize:
    headers = {
        "Nats-Msg-Id": group.id,
        PLAN_HEADER: Plan.of(group).pack(),
        TRACEPARENT_HEADER: traceparent(group.id, sampled=False),
    }
    subject = subjects.rollout(_RUN, _ENV)
    size = _stored(subject, headers, len(encode(group)))
    return MessageSize(
        kind="rollout", stream=subjects.ROLLOUTS, size=size, header=_stored(subject, headers, 0), per_group=1
    )


def _stored(subject: str, headers: dict[str, str], payload: int) -> int:
    """Return the bytes that a message takes in the server's file store; a large one lies there in chunks."""
    head = len("NATS/1.0\r\n\r\n") + sum(len(name) + len(value) + 4 for name, value in headers.items())
    size = _RECORD_BYTES + _RECORD_HEADER_BYTES + len(subject) + head + payload
    if payload > INLINE_BYTES:
        size += math.ceil(payload / CHUNK_BYTES) * (_RECORD_BYTES + len(subject))
    return size


class _Stages:
    """The logic of the stages, fed with groups that differ in their ratings alone. `gathered`: groups that the
    curriculum commits together."""

    def __init__(self, shape: GroupShape, config: RunConfig, group: RolloutGroup, gathered: int) -> None:
        self._shape, self._group, self._gathered, self._random = shape, group, gathered, random.Random(0)
        self._names = [f"rater_{number}" for number in range(shape.raters)] or ["reward"]
        members = [EnsembleMember(name=name, reference=name, version="1", bounds=(0.0, 1.0)) for name in self._names]
        self._ensemble = Ensemble(members, ScoringConfig())
        self._signals = signals_of(group.sequences)
        self._rule = RewardRule(config.advantage, config.reward_config)
        self._normalizer = RevisionNormalizers(_ENV, RewardTerms(config.normalization, self._rule))
        self._learner = NamedItemLearner(_ENV, config.curriculum)
        self._monitor = EnvMonitor(config.health)
        self._has_health = config.health.enabled
        batching = BatchingConfig(batch_size=shape.samples * shape.batch_groups, max_staleness=1_000_000)
        self._joiner = Joiner(batching)
        self._former = EntryFormer(batching, self._joiner, Chain(_RUN, _TRAINER, "0" * 16))
        self._scores: dict[str, GroupScore] = {}
        self._stamps: dict[str, list[Stamp]] = {}
        self._observed: list[str] = []
        self._sizes: dict[str, list[tuple[int, int]]] = {}
        """By kind, for each message: its bytes without and with the payload."""

    def feed(self, number: int) -> None:
        """Take in one more group, as its stages would."""
        seq = number + 1
        group = self._group.replace(id=new_group_id(), counter=seq, item=f"item-{number % _ITEMS}")
        score = self._score(group, seq)
        self._joiner.member(seq, _ENV, Plan.of(group), _NOW_NS, _NOW_NS)
        self._normalizer.member(seq, group.id)
        self._normalizer.resolve(group.id, seq, self._rule.columns(score), source=seq)
        while (step := self._normalizer.step()) is not None:
            rewards = [
                self._rule.reward(ready, self._scores.pop(ready.group), _stamp("normalizer")) for ready in step.ready
            ]
            self._reward(rewards, step.delta)
        self._form_batches()
        self._check_health()

    def sizes(self, groups: int) -> list[MessageSize]:
        """Return what was stored; of what grows with the history, by its later half."""
        found = []
        for kind, sizes in self._sizes.items():
            later = sizes[len(sizes) // 2 :]
            stream = subjects.LEDGER if kind in {"ledger", "state"} else subjects.EVENTS
            mean = sum(size for _, size in later) / len(later)
            found.append(
                MessageSize(kind=kind, stream=stream, size=mean, header=later[-1][0], per_group=len(sizes) / groups)
            )
        by_kind = {message.kind: message for message in found}
        states = {"reward": self._normalizer.state(), "curriculum": self._learner.state()}
        if self._has_health:
            states["alert"] = msgspec.msgpack.encode(self._monitor.state_dict())
        return [*found, *(_snapshot(kind, state, by_kind[kind]) for kind, state in states.items() if kind in by_kind)]

    def _score(self, group: RolloutGroup, seq: int) -> GroupScore:
        samples = self._shape.samples
        ratings = {name: [Rating(self._random.random()) for _ in range(samples)] for name in self._names}
        scored = self._ensemble.score(ratings)
        excerpts = excerpts_of(group.replace(id=f"{seq:032x}"))  # so that the plan is the same each time
        signals = msgspec.structs.replace(self._signals, excerpts=excerpts)
        score = GroupScore(
            group=group.id, seq=seq, item=group.item, policy_step=0, scores=scored.scores, ratings=scored.ratings,
            lengths=group.sequences.lengths, disagreement=scored.disagreement, success=self._random.random(),
            signals=signals, stamps=[_stamp("scorer")],
        )  # fmt: skip
        event = ScoreEvent(
            run=_RUN, env=_ENV, revision=subjects.LIVE, ensemble=self._ensemble.digest,
            raters=self._ensemble.versions, groups=[score],
        )  # fmt: skip
        self._store("score", event, {"Nats-Msg-Id": f"score.live.{group.id}"})
        self._scores[group.id] = score
        self._monitor.score(score)
        return score

    def _reward(self, rewards: list[GroupReward], delta: bytes) -> None:
        event = RewardEvent(
            run=_RUN, env=_ENV, revision=subjects.LIVE, advantage=self._rule.estimator.name, commit=_commit(delta),
            groups=rewards,
        )  # fmt: skip
        self._store("reward", event, _COMMIT_HEADERS)
        for reward in rewards:
            self._joiner.reward(reward.seq, _NOW_NS, reward)
            self._stamps[reward.group] = list(reward.stamps)
            self._monitor.reward(reward, event.advantage)
            self._learn(reward)

    def _learn(self, reward: GroupReward) -> None:
        feedback = self._learner.feedback_of(reward)
        if feedback is None:
            return
        self._learner.observe(feedback, reward.item)
        self._observed.append(reward.group)
        if len(self._observed) >= self._gathered:
            event = CurriculumEvent(
                run=_RUN, env=_ENV, revision=subjects.LIVE, strategy="irt", snapshot_id="0" * 24,
                commit=_commit(self._learner.take_delta()), observed=self._observed,
            )  # fmt: skip
            self._store("curriculum", event, _COMMIT_HEADERS)
            self._observed = []

    def _form_batches(self) -> None:
        while (chosen := self._former.choose()) is not None:
            content = self._former.next_entry_content(chosen, 1e-3)
            stamps = {one.group: [*self._stamps.pop(one.group), _stamp("batcher")] for one in chosen}
            entry = self._former.write(content, written_ns=_NOW_NS, stamps=stamps)
            self._store("ledger", entry, {**_COMMIT_HEADERS, PREVIOUS_HEADER: "1000000"})
            self._monitor.batch(self._former.chain.next_batch - 1, chosen)

    def _check_health(self) -> None:
        for source, is_full, judge in (
            ("groups", self._monitor.window_full, self._monitor.evaluate),
            ("batches", self._monitor.batches_full, self._monitor.judge_batches),
        ):
            if not is_full:
                continue
            results = judge()
            if self._has_health:
                state = msgspec.msgpack.encode(self._monitor.state_dict())
                event = AlertEvent(
                    run=_RUN, env=_ENV, revision=subjects.LIVE, commit=_commit(state), window=1,
                    groups=self._monitor.groups, source="groups" if source == "groups" else "batches",
                    results=results, standing=self._monitor.standing,
                )  # fmt: skip
                self._store("alert", event, _COMMIT_HEADERS)

    def _store(self, kind: subjects.Kind | Literal["ledger"], event: Event, headers: dict[str, str]) -> None:
        path = (_RUN, subjects.LIVE, _ENV)
        subject = subjects.ledger(_RUN, _TRAINER) if kind == "ledger" else subjects.event(kind, *path)
        sizes = _stored(subject, headers, 0), _stored(subject, headers, len(encode(event)))
        self._sizes.setdefault(kind, []).append(sizes)


def _snapshot(kind: str, state: bytes, commits: MessageSize) -> MessageSize:
    """Return the snapshots of a stage's whole state, which follow what its commits weigh."""
    size = _stored(subjects.state(_RUN, kind, subjects.LIVE, _ENV), _COMMIT_HEADERS, len(state))
    every = min(MAX_COMMITS_SINCE_SNAPSHOT, max(SNAPSHOT_EVERY, math.ceil(len(state) / 4 / commits.size)))
    return MessageSize(
        kind=f"state of {kind}",
        stream=subjects.LEDGER,
        size=size,
        header=0,
        per_group=commits.per_group / every,
        lasts=False,
    )


def _teacher(shape: GroupShape, group: RolloutGroup) -> list[MessageSize]:
    """Return a teacher's arrays and what says where they lie."""
    if shape.teacher_top_k is None:
        return []
    draw = np.random.default_rng(0)
    tokens, k = shape.samples * shape.tokens, shape.teacher_top_k
    top: dict[str, Any] = {
        "k": k,
        "topk_ids": as_bytes(draw.integers(0, _VOCABULARY, tokens * k), "int32"),
        "topk_logprobs": as_bytes(-draw.exponential(3.0, tokens * k), "float16"),
        "topk_mass": as_bytes(draw.random(tokens), "float16"),
        "topk_tail": as_bytes(-draw.exponential(3.0, tokens), "float16"),
    }
    arrays = TeacherLogprobs(
        run=_RUN, env=_ENV, group=group.id, teacher="teacher", tokenizer_hash=group.tokenizer_hash, temperature=1.0,
        logprobs=as_bytes(-draw.exponential(1.0, tokens), "float32"), **(top if k else {}),
    )  # fmt: skip
    pointer = TeacherEvent(
        run=_RUN, env=_ENV, revision=subjects.LIVE, teacher="teacher",
        groups=[TeacherPointer(group=group.id, seq=1, stored=1, stamps=[_stamp("teacher")])],
    )  # fmt: skip
    found = []
    for kind, stream, event, subject in (
        ("logprobs", subjects.TEACHER, arrays, subjects.logprobs(_RUN, subjects.LIVE, _ENV)),
        ("teacher", subjects.EVENTS, pointer, subjects.event("teacher", _RUN, subjects.LIVE, _ENV)),
    ):
        headers = {"Nats-Msg-Id": f"{kind}.live.1000000", ROLLOUT_HEADER: "1000000"}
        header, size = _stored(subject, headers, 0), _stored(subject, headers, len(encode(event)))
        found.append(MessageSize(kind=kind, stream=stream, size=size, header=header, per_group=1))
    return found


def _stamp(stage: str) -> Stamp:
    return Stamp(stage, _NOW_NS, _NOW_NS, _NOW_NS)


def _commit(delta: bytes) -> Commit:
    read = {stream: StreamMark(1_000_000, _NOW_NS) for stream in (subjects.EVENTS, subjects.ROLLOUTS)}
    cursors = dict.fromkeys(read, 1_000_000)
    return Commit(term="0" * 16, index=1_000_000, cursors=cursors, delta=delta, read=read, crc32=zlib.crc32(delta))
