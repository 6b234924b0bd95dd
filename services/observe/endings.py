"""Follows rollouts as they end, and selects those that are worth a look. Pure: no bus.

Takes ledger entries and the trainer's reports of its steps, in the order of the LEDGER stream, and the planning headers
of ROLLOUTS. Gives rollouts that failed, or were stale, late, redelivered or slow, by the rule of the exported traces
(`TraceSampler`), as far as stamps show. A trained rollout ends once a report names its step, which is when the
checkpoint is written.
"""

from typing import NamedTuple

import msgspec

from lachesis.pipeline.telemetry.messages import rebuild_trace
from lachesis.pipeline.telemetry.sampling import TraceSampler, is_late
from lachesis.pipeline.telemetry.spans import RolloutEnd, Span
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.planning_header import Plan
from lachesis.services.observe.overview import trace_url

__all__ = ["Endings", "RolloutEnding"]

_BATCHES = 1024
"""Batches without a report that are remembered: where no trainer reports, the oldest are forgotten."""


class _EndedMember(NamedTuple):
    seq: int
    env: str
    plan: Plan


class RolloutEnding(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that ended. `why`: the reason for which its trace is kept (`SamplingReason`); `seconds`: from its task
    to its end. `longest` is the span that took longest, `longest_s` how long; None where there is none.
    """

    group: str
    env: str
    ended_ns: int
    outcome: str
    why: str
    seconds: float
    longest: str | None = None
    longest_s: float | None = None
    reason: str | None = None
    url: str | None = None


class Endings:
    """`slow_s`: seconds from which a rollout is slow; None: slower than 99 of 100 of the last ones.

    `teacher`: whether batches wait for a teacher. `jaeger_url`: where traces are shown; None: nowhere.
    """

    def __init__(self, run: str, slow_s: float | None, *, teacher: bool = False, jaeger_url: str | None = None) -> None:
        self._run = run
        self._keeper = TraceSampler(0.0, slow_s)
        self._teacher = teacher
        self._jaeger_url = jaeger_url
        self._open: dict[int, _EndedMember] = {}
        self._batched: dict[int, tuple[LedgerEntry, list[_EndedMember]]] = {}

    def member(self, seq: int, env: str, plan: Plan) -> None:
        """Take in the rollout at `seq` of ROLLOUTS, before the entry that settles it."""
        self._open[seq] = _EndedMember(seq, env, plan)

    def entry(self, entry: LedgerEntry) -> list[RolloutEnding]:
        """Take in an entry; return what ended with it and is worth a look."""
        if entry.batch is not None:
            members = [self._open.pop(ref.seq, None) for ref in entry.batch.groups]
            self._batched[entry.batch.number] = entry, [member for member in members if member is not None]
            if len(self._batched) > _BATCHES:
                del self._batched[min(self._batched)]
        found = []
        for outcome in entry.outcomes:
            member = self._open.pop(outcome.seq, None)
            if member is not None and outcome.kind != "duplicate":
                stamps = entry.stamps.get(member.plan.group, [])
                found.append(self._ending_if_kept(member, stamps, outcome.kind, entry.written_ns, outcome.reason))
        for seq in [seq for seq in self._open if seq <= entry.watermark]:
            del self._open[seq]  # settled before this watch began
        return [ended for ended in found if ended is not None]

    def report(self, report: TrainReport) -> list[RolloutEnding]:
        """Take in a report; return what was trained by it and is worth a look."""
        steps = {step.batch: step for step in report.steps}
        found = []
        for number in [number for number in self._batched if number < report.next_batch]:
            entry, members = self._batched.pop(number)
            step = steps.get(number)
            if step is None:
                continue  # of a trainer that died before it could report
            for member in members:
                own = Stamp("trainer", entry.written_ns, step.start_ns, step.end_ns)
                stamps = [*entry.stamps.get(member.plan.group, []), own]
                found.append(self._ending_if_kept(member, stamps, "trained", step.end_ns))
        return [ended for ended in found if ended is not None]

    def _ending_if_kept(
        self, member: _EndedMember, stamps: list[Stamp], outcome: str, ended_ns: int, reason: str | None = None
    ) -> RolloutEnding | None:
        plan = member.plan
        seconds = (ended_ns - plan.started_ns) / 1e9
        late = self._teacher and outcome == "trained" and is_late(stamps)
        why = self._keeper.reason(plan.group, stamps, seconds, cause=outcome, late=late)
        if why is None:
            return None
        end = RolloutEnd(
            group=plan.group, run=self._run, env=member.env, seq=member.seq, sequences=plan.samples,
            policy_step=plan.policy_step, started_ns=plan.started_ns, ended_ns=ended_ns, outcome="dropped",
        )  # fmt: skip
        longest = max(rebuild_trace(end, stamps)[:-1], key=_took_ns, default=None)
        return RolloutEnding(
            group=plan.group,
            env=member.env,
            ended_ns=ended_ns,
            outcome=outcome,
            why=why,
            seconds=seconds,
            longest=None if longest is None else f"{longest.service} {longest.name.partition(' ')[0]}",
            longest_s=None if longest is None else _took_ns(longest) / 1e9,
            reason=reason,
            url=trace_url(self._jaeger_url, plan.group),
        )


def _took_ns(span: Span) -> int:
    return span.end_ns - span.start_ns
