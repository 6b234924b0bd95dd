"""The join of rollouts with their annotations.

A state machine that gives every rollout exactly one outcome.

It reads the rollouts of the run (in the order of ROLLOUTS) and annotations (in the order of EVENTS), interleaved in any
way and repeated any number of times. It produces `ready` groups, which a batch may take, and outcomes of all others. If
a group has several annotations of one kind, or a reward and a dead letter, the one stored first counts.

A settled rollout is *recorded* when `record` or `take_outcomes` hands it to the entry being written. `state` describes
only what is recorded. So a joiner that is made from the last stored entry and fed from its `watermark` + 1 and its
`events_cursor` comes to the same groups again, whatever its predecessor knew beyond that entry.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.batcher.pending_annotations import Annotation, PendingAnnotation, PendingAnnotations
from lachesis.pipeline.common.finite_mean import finite_mean
from lachesis.pipeline.ledger.chain import JoinState
from lachesis.pipeline.ledger.offline_start import OfflineStart
from lachesis.pipeline.ledger.producer_dedup import ProducerDedup, ResolvedSet
from lachesis.schemas.alerts import EnvironmentStanding
from lachesis.schemas.annotations import DeadLetter, GroupReward, Stamp, TeacherPointer
from lachesis.schemas.ledger import GroupRef, LedgerEntry, Outcome, OutcomeKind
from lachesis.schemas.planning_header import Plan
from lachesis.schemas.subjects import ROLLOUTS

__all__ = ["Joiner", "PendingRollout", "Wanted", "group_ref"]

_TEACHER_STAGE = "teacher"
_MAX_REASON_CHARS = 500


Wanted = Literal["score", "teacher"]
"""The annotations that a rollout may wait for, until a deadline at most."""


@dataclass(slots=True)
class PendingRollout:
    """A rollout without a recorded outcome. `plan` is None if its header could not be read.

    `stored_ns` is the server's Unix time, `seen_ns` the time of the clock that `Joiner.expire` uses. `lost` has the
    sequence in EVENTS of an unreadable message that may have held what this rollout waits for.
    """

    seq: int
    env: str
    plan: Plan | None
    stored_ns: int
    seen_ns: int = 0
    reward: GroupReward | None = None
    teacher: TeacherPointer | None = None
    without_teacher: bool = False
    lost: dict[Wanted, int] = field(default_factory=dict)
    first_event: int | None = None
    annotated_ns: int = 0
    outcome: Outcome | None = None
    stamps: list[Stamp] = field(default_factory=list)


def group_ref(seq: int, env: str, plan: Plan, reward: GroupReward, teacher: int | None) -> GroupRef:
    """Return how a batch refers to the rollout at `seq`.

    `teacher` is the sequence of its logprobs in TEACHER.
    """
    scores = [score for score in reward.scores if score is not None]
    return GroupRef(
        group=plan.group,
        seq=seq,
        env=env,
        sequences=plan.samples,
        tokens=plan.tokens,
        policy_step=plan.policy_step,
        advantages=reward.advantages,
        teacher=teacher,
        score=finite_mean(scores),
        turn_advantages=reward.turn_advantages,
        newest_step=plan.newest_step,
    )


class Joiner:
    """See the module's docstring. `entry` is the last one of the ledger, None if there is none yet; `offline` is
    None if this trainer's own policies make the rollouts.

    `frontier` is the last sequence of ROLLOUTS seen; `ready` holds the groups a batch may take, by that sequence.
    """

    def __init__(
        self, config: BatchingConfig, entry: LedgerEntry | None = None, *, offline: OfflineStart | None = None
    ) -> None:
        self._config = config
        self._offline = offline
        self._recorded = ResolvedSet(entry.watermark, entry.resolved) if entry else ResolvedSet()
        self._dedup = ProducerDedup(entry.producers if entry else None)
        self._event = entry.events_cursor if entry else 0
        self._open: dict[int, PendingRollout] = {}
        self._by_group: dict[str, PendingRollout] = {}
        self._by_key: dict[tuple[str, int, int], PendingRollout] = {}
        self._pending = PendingAnnotations()
        self._deadlines: list[tuple[int, int, Wanted]] = []
        self._outcomes: deque[PendingRollout] = deque()
        self._batch = 0
        self._standings: dict[str, EnvironmentStanding] = {}
        self.frontier = self._recorded.watermark
        self.ready: dict[int, GroupRef] = {}

    # membership

    def member(self, seq: int, env: str, plan: Plan, stored_ns: int, seen_ns: int) -> None:
        """Add the rollout stored at `seq`; a repeated one is ignored. Its deadlines count from `seen_ns`."""
        member = self._admit(PendingRollout(seq, env, plan, stored_ns, seen_ns))
        if member is None:
            return
        key = (plan.producer, plan.epoch, plan.counter)
        earlier = self._by_key.get(key) or self._by_group.get(plan.group)
        if earlier is not None or plan in self._dedup:
            where = f", first at sequence {earlier.seq}" if earlier else ""
            self._settle(member, "duplicate", f"producer {plan.producer} published it before{where}")
        else:
            self._by_key[key] = self._by_group[plan.group] = member
            self._settle_or_await(member, plan)
        for pending in self._pending.pop(plan.group, str(seq)):
            if seq >= pending.first:
                self._apply(member, pending)
        self._pending.drop_up_to(self.frontier)

    def unreadable(self, seq: int, env: str, reason: str) -> None:
        """Add a message of ROLLOUTS that is no rollout: its outcome is dead."""
        member = self._admit(PendingRollout(seq, env, plan=None, stored_ns=0))
        if member is not None:
            self._settle(member, "dead", reason)
            self._pending.drop_up_to(self.frontier)

    def _admit(self, member: PendingRollout) -> PendingRollout | None:
        if member.seq <= self.frontier:
            return None
        self.frontier = member.seq
        if member.seq in self._recorded:
            self._pending.drop_up_to(self.frontier)
            return None
        self._open[member.seq] = member
        return member

    def _settle_or_await(self, member: PendingRollout, plan: Plan) -> None:
        """Settle a new rollout that no batch can hold; else set the deadlines of its annotations."""
        config = self._config
        if plan.samples > config.batch_size:
            reason = f"{plan.samples} samples where a batch has {config.batch_size}; lower the environment's samples"
            self._settle(member, "oversized", reason)
        elif config.token_budget is not None and plan.tokens > config.token_budget:
            self._settle(member, "oversized", f"{plan.tokens} tokens where a batch may have {config.token_budget}")
        elif not plan.trainable:
            self._settle(member, "untrainable", "it came without the logprobs that it was sampled with")
        elif self._offline is None and plan.last_step > self._batch:
            # a policy of step n has been trained on n batches; this would never age
            reason = f"made by policy step {plan.last_step}, which cannot be: {self._batch} batches were ever formed"
            self._settle(member, "dead", reason)
        elif not self._drop_if_stale(member) and not self._divert(member):
            deadlines: dict[Wanted, float | None] = {
                "score": config.score_deadline_s,
                "teacher": self._teacher_deadline(),
            }
            for what, seconds in deadlines.items():
                if seconds is not None:
                    heapq.heappush(self._deadlines, (member.seen_ns + int(seconds * 1e9), member.seq, what))

    def _teacher_deadline(self) -> float | None:
        return None if self._config.teacher == "off" else self._config.teacher_deadline_s

    # annotations

    def reward(self, event_seq: int, stored_ns: int, item: GroupReward, first: int = 1) -> bool:
        """Add a reward stored at `event_seq` of EVENTS.

        False: there is no room for it until its rollout has been seen. After False, feed the rollouts up to the end of
        ROLLOUTS, call `end_of_rollouts`, and offer it again. It counts for rollouts from sequence `first` on: a
        promoted revision scores a copy of rollouts that another revision scores.
        """
        member = self._by_group.get(item.group)
        if member is not None and member.seq < first:
            self._event = max(self._event, event_seq)
            return True
        return self._annotate(member, item.group, PendingAnnotation(event_seq, stored_ns, item.seq, item, first))

    def teacher(self, event_seq: int, stored_ns: int, item: TeacherPointer) -> bool:
        """Add a pointer to the teacher's logprobs, as `reward` does."""
        return self._annotate(
            self._by_group.get(item.group), item.group, PendingAnnotation(event_seq, stored_ns, item.seq, item)
        )

    def dead(self, event_seq: int, stored_ns: int, letter: DeadLetter) -> bool:
        """Add a dead letter, as `reward` does.

        It names a message, not a group: a dead letter for a duplicate does not end the original.
        """
        item: Annotation = letter
        if not letter.ends_rollout:
            if letter.stream != ROLLOUTS or letter.stage != _TEACHER_STAGE:
                self._event = max(self._event, event_seq)
                return True
            item = TeacherPointer(group=letter.group or "", seq=letter.seq, stored=None, reason=letter.reason)
        annotation = PendingAnnotation(event_seq, stored_ns, letter.seq, item)
        return self._annotate(self._open.get(letter.seq), str(letter.seq), annotation)

    def lost(self, event_seq: int, env: str, now_ns: int, kinds: Iterable[Wanted]) -> None:
        """Record that annotations of `env` stored at `event_seq` of EVENTS cannot be read.

        `kinds`: the kinds that they may have.

        Every waiting rollout of the environment gets a deadline, since any of them may wait in vain. So feed the
        rollouts up to the end of ROLLOUTS first.
        """
        self._event = max(self._event, event_seq)
        due_ns = now_ns + int(self._config.lost_deadline_s * 1e9)
        for member in self._open.values():
            if member.env != env or member.outcome is not None or member.seq in self.ready:
                continue
            # until it is settled, a restart reads that message again
            member.first_event = event_seq if member.first_event is None else min(member.first_event, event_seq)
            for kind in kinds:
                if kind not in member.lost:
                    member.lost[kind] = event_seq
                    heapq.heappush(self._deadlines, (due_ns, member.seq, kind))

    def _annotate(self, member: PendingRollout | None, target: str, annotation: PendingAnnotation) -> bool:
        self._event = max(self._event, annotation.event_seq)
        if member is not None:
            self._apply(member, annotation)
        elif annotation.rollout_seq > self.frontier:
            return self._pending.hold(target, annotation)
        return True

    def end_of_rollouts(self) -> None:
        """Record that the end of ROLLOUTS was reached after the last annotation was added.

        Annotations that still wait for a rollout will never join one.
        """
        self._pending.clear()

    @property
    def waiting_for_members(self) -> bool:
        """Whether annotations are kept for rollouts not seen yet."""
        return len(self._pending) > 0

    def _apply(self, member: PendingRollout, annotation: PendingAnnotation) -> None:
        if member.plan is not None and annotation.item.group not in (None, "", member.plan.group):
            return  # it belongs to a rollout that was stored at this sequence before the server lost it
        first = member.first_event
        member.first_event = annotation.event_seq if first is None else min(first, annotation.event_seq)
        if member.outcome is not None:
            return
        member.annotated_ns = max(member.annotated_ns, annotation.stored_ns)
        match annotation.item:
            case GroupReward() as item:
                if member.reward is None:
                    member.reward = item
                    member.stamps += item.stamps
            case TeacherPointer() as item:
                if member.teacher is None:
                    member.teacher = item
                    member.stamps += item.stamps
            case DeadLetter() as item:
                if member.reward is None:
                    self._settle(member, "dead", f"{item.stage}, {item.kind}: {item.reason}")
                return
        self._decide(member)

    def _decide(self, member: PendingRollout) -> None:
        plan, reward, teacher = member.plan, member.reward, member.teacher
        if plan is None or reward is None or member.outcome is not None or member.seq in self.ready:
            return
        if reward.verdict != "trainable" and not reward.trains:
            self._settle(member, reward.verdict, reward.reason)
        elif len(reward.advantages) != plan.samples:
            self._settle(member, "unscorable", f"{len(reward.advantages)} advantages for {plan.samples} samples")
        elif all(value is None for value in reward.advantages):
            self._settle(member, "unscorable", "called trainable, but every advantage is missing")
        elif self._config.teacher == "off":
            self._make_ready(member, plan, reward, teacher=None)
        elif teacher is not None and teacher.stored is not None:
            self._make_ready(member, plan, reward, teacher=teacher.stored)
        elif teacher is not None or member.without_teacher:
            if self._config.teacher == "required":
                why = teacher.reason if teacher else f"nothing in {self._config.teacher_deadline_s} s"
                self._settle(member, "unscorable", f"teacher: {why}")
            else:
                self._make_ready(member, plan, reward, teacher=None)

    def _make_ready(self, member: PendingRollout, plan: Plan, reward: GroupReward, *, teacher: int | None) -> None:
        self.ready[member.seq] = group_ref(member.seq, member.env, plan, reward, teacher)

    def to_whiten(self, seqs: Iterable[int]) -> dict[int, list[int]]:
        """Return the token counts of each sample of the ready groups that need whitened advantages."""
        rewards = {seq: self._open[seq].reward for seq in seqs}
        return {seq: reward.lengths for seq, reward in rewards.items() if reward is not None and reward.lengths}

    # time and staleness

    def next_deadline_ns(self) -> int | None:
        """Return the time, on the clock of `seen_ns`, at which `expire` has something to do."""
        self._drop_met_deadlines()
        return self._deadlines[0][0] if self._deadlines else None

    def _drop_met_deadlines(self) -> None:
        """Forget the next deadlines as long as their annotations have arrived: no wake-up is needed for them."""
        while self._deadlines and not self._is_awaited(*self._deadlines[0][1:]):
            heapq.heappop(self._deadlines)

    def _is_awaited(self, seq: int, what: Wanted) -> bool:
        """Return whether the rollout at `seq` can still use `what`."""
        member = self._open.get(seq)
        if member is None or member.outcome is not None or seq in self.ready:
            return False
        return member.teacher is None if what == "teacher" else member.reward is None

    def expire(self, now_ns: int) -> list[PendingRollout]:
        """Apply the deadlines that have passed.

        Go on without the teacher, and return the rollouts to be given up unscored. Those stay open: the caller
        publishes their dead letters, and each ends its rollout when it is read from EVENTS.
        """
        unscored = []
        while (due_ns := self.next_deadline_ns()) is not None and due_ns <= now_ns:
            _, seq, what = heapq.heappop(self._deadlines)
            member = self._open[seq]
            if what == "teacher":
                member.without_teacher = True
                self._decide(member)
            else:
                unscored.append(member)
        return unscored

    def drop_stale(self, batch: int) -> None:
        """Drop every group that is too stale for the next batch.

        Batch `batch` is trained into optimizer step `batch` + 1.
        """
        self._batch = batch
        for member in self._open.values():
            if member.outcome is None:
                self._drop_if_stale(member)

    def _drop_if_stale(self, member: PendingRollout) -> bool:
        """Settle the rollout if it is too old; staleness only grows, so it need not be scored first."""
        if member.plan is None:
            return False
        offline, plan = self._offline, member.plan
        most = self._config.max_staleness if offline is None else offline.max_staleness
        if offline is None:
            staleness = self._batch - self._config.step_of(plan)
        else:
            staleness = offline.staleness(self._batch, plan.policy_step)
        if most is None or staleness <= most:
            return False
        self._settle(member, "stale", f"{staleness} steps old in batch {self._batch}, where {most} are allowed")
        return True

    def due(self) -> set[int]:
        """Return the ready groups that are too stale for every batch after the next one."""
        if self._offline is not None:
            return set()
        last = self._batch - self._config.max_staleness
        return {seq for seq, ref in self.ready.items() if self._config.step_of(ref) <= last}

    # quarantine

    def quarantine(self, env: str, standing: EnvironmentStanding) -> None:
        """Drop every rollout of `env` that `standing` excludes from training, until the standing changes."""
        self._standings[env] = standing
        for member in self._open.values():
            if member.outcome is None:
                self._divert(member)

    def _divert(self, member: PendingRollout) -> bool:
        standing = self._standings.get(member.env)
        reason = standing.untrainable_reason(member.seq) if standing else None
        if reason is not None:
            self._settle(member, "quarantined", reason)
        return reason is not None

    def _settle(self, member: PendingRollout, kind: OutcomeKind, reason: str | None) -> None:
        plan = member.plan
        member.outcome = Outcome(
            seq=member.seq,
            group=plan.group if plan else None,
            kind=kind,
            sequences=plan.samples if plan else 0,
            reason=reason[:_MAX_REASON_CHARS] if reason else None,
        )
        self.ready.pop(member.seq, None)
        self._outcomes.append(member)

    # recording

    @property
    def unrecorded_outcomes(self) -> int:
        """Outcomes that no entry holds yet."""
        return len(self._outcomes)

    @property
    def undecided(self) -> int:
        """Rollouts that are neither ready nor settled: they still wait for an annotation."""
        return len(self._open) - len(self.ready) - len(self._outcomes)

    @property
    def open_sequences(self) -> int:
        """Samples of all rollouts without a recorded outcome."""
        return sum(member.plan.samples for member in self._open.values() if member.plan)

    def take_outcomes(self, limit: int) -> list[PendingRollout]:
        """Record up to `limit` outcomes, the earliest settled first, and return their rollouts."""
        taken = [self._outcomes.popleft() for _ in range(min(limit, len(self._outcomes)))]
        self._close(taken)
        return taken

    def record(self, seqs: Iterable[int]) -> list[PendingRollout]:
        """Record ready groups as batched and return them."""
        taken = []
        for seq in seqs:
            del self.ready[seq]
            taken.append(self._open[seq])
        self._close(taken)
        return taken

    def _close(self, members: list[PendingRollout]) -> None:
        for member in members:
            del self._open[member.seq]
            self._recorded.mark(member.seq)
            plan = member.plan
            if plan is None or (member.outcome is not None and member.outcome.kind == "duplicate"):
                continue  # a duplicate must not mark the original, which may still be open
            del self._by_key[plan.producer, plan.epoch, plan.counter]
            del self._by_group[plan.group]
            if self._dedup.record(plan):
                self._dedup.close_gaps(plan, self._lowest_open_counter(plan))

    def _lowest_open_counter(self, plan: Plan) -> int | None:
        """Return the lowest counter of the plan's producer among open rollouts.

        A restart must not take this counter for a repeat, nor any above it that may still arrive.
        """
        life = (plan.producer, plan.epoch)
        return min((counter for *key, counter in self._by_key if tuple(key) == life), default=None)

    def state(self) -> JoinState:
        """Return what is recorded, as the next entry describes it."""
        lowest_open = next(iter(self._open), self.frontier + 1)
        self._recorded.mark_up_to(lowest_open - 1)
        needed = [member.first_event for member in self._open.values()] + [self._pending.lowest_event()]
        cursor = min((event for event in needed if event is not None), default=self._event)
        return JoinState(self._recorded.watermark, self._recorded.pack(), min(cursor, self._event), self._dedup.pack())
