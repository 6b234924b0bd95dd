"""Describes one rollout's way through the pipeline, from its messages. Pure: no bus, no clock.

Takes its planning header, and the annotations, dead letters, ledger entry and train reports that concern it. Gives its
state in words, and its spans, which are those of its trace (`pipeline.telemetry.spans`), so that the terminal and
Jaeger show the same.
"""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.telemetry.messages import consume_spans, rebuild_trace
from lachesis.pipeline.telemetry.spans import RolloutEnd, Span, batch_trace, generate_span
from lachesis.schemas import subjects
from lachesis.schemas.annotations import (
    DeadLetter,
    GroupReward,
    GroupScore,
    RewardEvent,
    ScoreEvent,
    Stamp,
    TeacherEvent,
    TeacherPointer,
)
from lachesis.schemas.ledger import LedgerEntry, Outcome, TrainReport
from lachesis.schemas.planning_header import Plan

__all__ = ["RolloutTimeline", "Timeline", "decided_seqs"]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout as `lachesis trace` shows it. Times are Unix ns of the server's clock; None: not known or not yet.

    state: under way, batched, trained, dead, left over (the run took its last step without it), or what else became of
    it (stale, zero_variance, ...). waits_for says what a rollout waits for, reason why one was not trained. seconds:
    from its task to its end, of one that goes on to `now_ns`; None: when it ended is not known. spans: as in its trace.
    """

    group: str
    run: str
    env: str
    seq: int
    samples: int
    sequences: int
    tokens: int
    policy_step: int
    producer: str
    started_ns: int
    stored_ns: int
    ended_ns: int | None
    now_ns: int
    state: str
    waits_for: str | None
    reason: str | None
    step: int | None
    seconds: float | None
    spans: list[Span]


def decided_seqs(entry: LedgerEntry) -> set[int]:
    """Return the sequences of the rollouts of which an entry says what became of them."""
    batched = entry.batch.groups if entry.batch is not None else []
    return {ref.seq for ref in batched} | {outcome.seq for outcome in entry.outcomes}


@dataclass(slots=True)
class RolloutTimeline:
    """Gathers what the streams hold of the rollout at `seq` of ROLLOUTS."""

    run: str
    env: str
    seq: int
    plan: Plan
    stored_ns: int
    revision: str = subjects.LIVE
    score: GroupScore | None = None
    reward: GroupReward | None = None
    teacher: TeacherPointer | None = None
    letters: list[DeadLetter] = field(default_factory=list)
    entry: LedgerEntry | None = None
    outcome: Outcome | None = None
    batch: int | None = None
    trained_ns: tuple[int, int] | None = None
    reported: bool = False
    void: str | None = None
    dropped: str | None = None
    is_left_over: bool = False

    def annotation(self, event: ScoreEvent | RewardEvent | TeacherEvent | DeadLetter) -> None:
        """Take in an event of EVENTS; the first of each kind counts."""
        if isinstance(event, DeadLetter):
            if event.group == self.plan.group or (event.stream == "ROLLOUTS" and event.seq == self.seq):
                self.letters.append(event)
            return
        for item in event.groups:
            if item.group != self.plan.group:
                continue
            match item:
                case GroupScore():
                    self.score = self.score or item
                case GroupReward():
                    self.reward = self.reward or item
                case TeacherPointer():
                    self.teacher = self.teacher or item

    def ledger(self, entry: LedgerEntry) -> None:
        """Take in an entry of the ledger."""
        if self.entry is not None:
            return
        if entry.batch is not None and any(ref.seq == self.seq for ref in entry.batch.groups):
            self.entry, self.batch = entry, entry.batch.number
        for outcome in entry.outcomes:
            if outcome.seq == self.seq:
                self.entry, self.outcome = entry, outcome

    def report(self, report: TrainReport) -> None:
        """Take in a trainer's report."""
        if self.batch is None or report.next_batch <= self.batch:
            return
        self.reported = True
        self.void = next((void.reason for void in report.voids if void.batch == self.batch), self.void)
        self.dropped = next((drops.reason for drops in report.drops if self.seq in drops.seqs), self.dropped)
        times = [(step.start_ns, step.end_ns) for step in report.steps if step.batch == self.batch]
        self.trained_ns = times[-1] if times else self.trained_ns

    def logged(self, start_ns: int, end_ns: int) -> None:
        """Take in when its step was taken by the trainer's log of figures, which is ahead of its reports."""
        self.reported, self.trained_ns = True, (start_ns, end_ns)

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be learned from the ledger."""
        return self.outcome is not None or self.trained_ns is not None

    def is_annotated(self, config: BatchingConfig) -> bool:
        """Whether nothing more is to be learned from EVENTS."""
        taught = self.teacher is not None or config.teacher == "off"
        return self.score is not None and self.reward is not None and taught

    def stamps(self) -> list[Stamp]:
        """Return the stamps of every stage that is known to have handled it."""
        if self.entry is not None and self.entry.stamps.get(self.plan.group):
            return self.entry.stamps[self.plan.group]
        items = (self.reward or self.score, self.teacher)
        return [stamp for item in items if item is not None for stamp in item.stamps]

    def timeline(self, config: BatchingConfig, now_ns: int) -> Timeline:
        """Return all of it as of `now_ns`. `config` says whether batches wait for a teacher."""
        plan = self.plan
        state, waits_for = self.state(config)
        ended_ns = self._ended_ns()
        until_ns = now_ns if ended_ns is None and self._end() is None else ended_ns
        return Timeline(
            group=plan.group,
            run=self.run,
            env=self.env,
            seq=self.seq,
            samples=plan.samples,
            sequences=plan.sequences,
            tokens=plan.tokens,
            policy_step=plan.policy_step,
            producer=plan.producer,
            started_ns=plan.started_ns,
            stored_ns=self.stored_ns,
            ended_ns=ended_ns,
            now_ns=now_ns,
            state=state,
            waits_for=waits_for,
            reason=self.reason,
            step=None if self.batch is None else self.batch + 1,
            seconds=None if until_ns is None else (until_ns - plan.started_ns) / 1e9,
            spans=self._spans(state, now_ns),
        )

    def state(self, config: BatchingConfig) -> tuple[str, str | None]:
        """Return its state as in `Timeline`, and what it waits for."""
        if (ended := self._end()) is not None:
            return ended, None
        if self.batch is not None:
            return "batched", f"the trainer: batch {self.batch}"
        if self._is_dead:
            return "dead", "the batcher, to record the outcome"
        return "under way", self._next_stage(config)

    def _end(self) -> str | None:
        if self.outcome is not None:
            return self.outcome.kind
        if self.void is not None:
            return "void"
        if self.dropped is not None:
            return "dropped"
        if self.reported:
            return "trained"
        if self.is_left_over:
            return "dead" if self._is_dead else "left over"
        return None

    @property
    def _is_dead(self) -> bool:
        return any(letter.ends_rollout for letter in self.letters)

    def _next_stage(self, config: BatchingConfig) -> str:
        if self.score is None:
            return "the scorer"
        if self.reward is None:
            return "the normalizer"
        if not self.reward.trains:
            return f"the batcher, to record the outcome ({self.reward.verdict})"
        if config.teacher != "off" and self.teacher is None:
            return "the teacher"
        return "the batcher: a batch that it fits into"

    @property
    def reason(self) -> str | None:
        """Why it was not trained, if it was not."""
        if self.void is not None or self.dropped is not None:
            return self.void or self.dropped
        if self.letters:
            letter = self.letters[0]
            return f"{letter.stage}, {letter.kind}, attempt {letter.attempts}: {letter.reason} ({letter.place})"
        if self.outcome is not None and self.outcome.reason:
            return self.outcome.reason
        if self.is_left_over:
            return "the run took its last step without it"
        return self.teacher.reason if self.teacher is not None else None

    def _ended_ns(self) -> int | None:
        if self.trained_ns is not None:
            return self.trained_ns[1]
        return self.entry.written_ns if self.entry is not None and self.outcome is not None else None

    def _spans(self, state: str, now_ns: int) -> list[Span]:
        plan, stamps = self.plan, self.stamps()
        outcome: Literal["trained", "dropped", "dead_letter"] = "dropped"
        if state == "trained":
            outcome = "trained"
        elif state == "dead":
            outcome = "dead_letter"
        ended_ns = self._ended_ns()
        end = RolloutEnd(
            group=plan.group,
            run=self.run,
            env=self.env,
            seq=self.seq,
            sequences=plan.samples,
            policy_step=plan.policy_step,
            started_ns=plan.started_ns,
            ended_ns=ended_ns or now_ns,
            outcome=outcome,
            revision=self.revision,
            reason=self.reason,
            step=None if self.batch is None else self.batch + 1,
            staleness=None if self.batch is None else self.batch - plan.policy_step,
        )
        *spans, root = rebuild_trace(end, stamps)
        if not stamps:
            spans = [generate_span(plan.group, self.env, (plan.started_ns, self.stored_ns))]
        if self.entry is not None and self.batch is not None and self.trained_ns is not None:
            trace = batch_trace(self.run, self.entry.trainer, self.batch)
            times = (self.entry.written_ns, *self.trained_ns)
            ledger = subjects.ledger(self.run, self.entry.trainer)
            spans += consume_spans("trainer", plan.group, trace, self.batch + 1, times, subject=ledger)
        return [*([root] if ended_ns is not None else []), *spans]
