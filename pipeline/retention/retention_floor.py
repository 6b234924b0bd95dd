"""Computes the floor: from where on each subject's history may still be read. Pure.

Messages below the lowest claim on a subject are no longer needed, even if processes are killed and restarted. The
claims:

    ROLLOUTS, rl.rollout
      batcher, governor  a start reads on behind the watermark of the last entry, below which all have an outcome
      scorer, teacher    durable consumers: what is not acknowledged comes again
      normalizer         a start reads the headers of its windows that are not folded: the cursor of its last commit
      trainer            fetches what the batches behind its last report refer to; it refuses older checkpoints
    EVENTS
      score              normalizer: the cursor of its last commit
      dead               normalizer, and the batcher: the cursor of the ledger's last entry
      reward             batcher; curriculum: the cursor of its last commit; and the normalizer, whose commits they
                         are: a start reads those behind the last snapshot
      curriculum         the curriculum, whose commits they are
      teacher            batcher
      score, dead,       health service, where there is one: the cursor of its last commit
      reward
      alert              health service, whose commits they are, and its webhook, if it has one
      eval               few, and results: they are not trimmed
    TEACHER, rl.logprobs
      trainer            as above
      batcher            may still batch a group that has no outcome yet, so its logprobs stay

Checkpoints, snapshots and cursors only move forward, so a claim that was read a while ago is at worst too low. Any
other reader of history, for example a replay, registers a hold, which claims whole streams (`holds`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lachesis.schemas import subjects
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.retention import Hold
from lachesis.schemas.subjects import EVENTS, ROLLOUTS, TEACHER

__all__ = [
    "RetentionClaim",
    "RetentionInputs",
    "StageProgress",
    "UntrainedReferences",
    "claims",
    "claims_on",
    "hold_claims",
    "lowest_seqs",
    "trimmable",
]

_TRIMMED_KINDS: tuple[subjects.Kind, ...] = ("score", "dead", "reward", "curriculum", "teacher", "alert")


class RetentionClaim(NamedTuple):
    """`holder` needs the messages on `subject` (or all of the stream, with `>`) from sequence `needs` on."""

    stream: str
    subject: str
    needs: int
    holder: str


class StageProgress(NamedTuple):
    """Position of a stateful stage: the cursors of its last commit, and the last commit in its snapshot."""

    cursors: Mapping[str, int] = {}
    covers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionInputs:
    """Positions of the readers, from the log and the broker, each read at some time.

    The webhook was sent the alerts up to `webhook` in EVENTS (None: there is no webhook). `acknowledged` is by durable
    stage; `normalizers`, `curricula` (environments without a curriculum left out) and `monitors` (None: no health
    service runs) are by environment. `batched` is the lowest sequence of ROLLOUTS and of TEACHER that batches may still
    be fetched from. Every rollout with logprobs below `logprobs` in TEACHER has an outcome.
    """

    watermark: int = 0
    events_cursor: int = 0
    acknowledged: Mapping[str, int] = field(default_factory=dict)
    normalizers: Mapping[str, StageProgress] = field(default_factory=dict)
    curricula: Mapping[str, StageProgress] = field(default_factory=dict)
    monitors: Mapping[str, StageProgress] | None = field(default_factory=dict)
    webhook: int | None = None
    batched: Mapping[str, int] = field(default_factory=dict)
    logprobs: int = 1


def trimmable(stream: str, run: str, revision: str, environments: Iterable[str]) -> list[str]:
    """Return the subjects that may be trimmed.

    An environment that the run no longer has keeps its history.
    """
    match stream:
        case subjects.ROLLOUTS:
            return [subjects.rollout(run, env) for env in environments]
        case subjects.EVENTS:
            return [subjects.event(kind, run, revision, env) for env in environments for kind in _TRIMMED_KINDS]
        case subjects.TEACHER:
            return [subjects.logprobs(run, revision, env) for env in environments]
        case subjects.CALLS:
            return [subjects.call(run, env) for env in environments]
    return []


def claims(facts: RetentionInputs, run: str, revision: str, environments: Iterable[str]) -> list[RetentionClaim]:
    """Return the claims of the run's own services on what is `trimmable`."""
    found = []
    for env in environments:
        rollout, logprobs = subjects.rollout(run, env), subjects.logprobs(run, revision, env)
        score, dead, reward, curriculum, teacher = (
            subjects.event(kind, run, revision, env) for kind in ("score", "dead", "reward", "curriculum", "teacher")
        )
        normalizer = facts.normalizers.get(env, StageProgress())
        learner = facts.curricula.get(env, StageProgress())
        name = f"normalizer of {env}"
        scored = normalizer.cursors.get(EVENTS, 1)
        found += [
            RetentionClaim(ROLLOUTS, rollout, facts.watermark + 1, "batcher, for rollouts without an outcome"),
            RetentionClaim(ROLLOUTS, rollout, normalizer.cursors.get(ROLLOUTS, 1), name),
            *(RetentionClaim(ROLLOUTS, rollout, seq + 1, stage) for stage, seq in facts.acknowledged.items()),
            *(
                RetentionClaim(EVENTS, subject, max(1, facts.events_cursor), "batcher")
                for subject in (dead, reward, teacher)
            ),
            *(RetentionClaim(EVENTS, subject, scored, name) for subject in (score, dead)),
            RetentionClaim(EVENTS, reward, normalizer.covers + 1, f"{name}, for its start"),
            RetentionClaim(EVENTS, curriculum, learner.covers + 1, f"curriculum of {env}, for its start"),
            RetentionClaim(TEACHER, logprobs, facts.logprobs, "batcher, for logprobs of rollouts without an outcome"),
        ]
        if env in facts.curricula:
            found.append(RetentionClaim(EVENTS, reward, learner.cursors.get(EVENTS, 1), f"curriculum of {env}"))
        alert = subjects.event("alert", run, revision, env)
        if facts.monitors is None:
            found.append(RetentionClaim(EVENTS, alert, 1, "the log of alerts, which is kept whole"))
        else:
            monitor, name = facts.monitors.get(env, StageProgress()), f"health service, for {env}"
            judged = monitor.cursors.get(EVENTS, 1)
            found += [
                *(RetentionClaim(EVENTS, subject, judged, name) for subject in (score, dead, reward)),
                RetentionClaim(EVENTS, alert, monitor.covers + 1, f"{name}, for its start"),
            ]
            if facts.webhook is not None:
                found.append(RetentionClaim(EVENTS, alert, facts.webhook + 1, "webhook, which has not taken the rest"))
        for stream, subject in ((ROLLOUTS, rollout), (TEACHER, logprobs)):
            if stream in facts.batched:
                found.append(
                    RetentionClaim(stream, subject, facts.batched[stream], "trainer, for batches behind a checkpoint")
                )
    return found


def hold_claims(holds: Mapping[str, Hold]) -> list[RetentionClaim]:
    """Return the claims of registered holds."""
    return [
        RetentionClaim(stream, ">", needs, f"{name} ({hold.about})")
        for name, hold in holds.items()
        for stream, needs in hold.needs.items()
    ]


def claims_on(claimed: Iterable[RetentionClaim], stream: str, subject: str) -> list[RetentionClaim]:
    """Return the claims on `subject`, the lowest first: nothing at or above the lowest may be deleted."""
    found = (claim for claim in claimed if claim.stream == stream and claim.subject in (subject, ">"))
    return sorted(found, key=lambda claim: claim.needs)


class UntrainedReferences:
    """References of batches that a trainer may still fetch: those after the last batch it has reported.

    Entries and reports are fed in the order of the ledger.
    """

    def __init__(self) -> None:
        self.position = 0
        """Index of the first entry that matters."""
        self._batched: dict[int, dict[str, int]] = {}  # by entry: the lowest sequence by stream

    def record_report(self, report: TrainReport) -> None:
        """Record that the trainer has a checkpoint that holds entry `report.ledger_index`."""
        self.position = report.ledger_index + 1
        self._batched = {index: seqs for index, seqs in self._batched.items() if index >= self.position}

    def record_entry(self, entry: LedgerEntry) -> None:
        """Record a new entry of the ledger."""
        if entry.batch is None or entry.index < self.position:
            return
        self._batched[entry.index] = lowest_seqs((ref.seq, ref.teacher) for ref in entry.batch.groups)

    def lowest_seqs(self) -> dict[str, int]:
        """Return, by stream, the lowest sequence that may be fetched; a stream without one is left out."""
        found: dict[str, int] = {}
        for seqs in self._batched.values():
            for stream, seq in seqs.items():
                found[stream] = min(seq, found.get(stream, seq))
        return found


def lowest_seqs(groups: Iterable[tuple[int, int | None]]) -> dict[str, int]:
    """Return, by stream, the lowest sequence of `groups` in ROLLOUTS and, if any, in TEACHER."""
    rollouts, teachers = zip(*groups, strict=True)
    known = [seq for seq in teachers if seq is not None]
    return {ROLLOUTS: min(rollouts)} | ({TEACHER: min(known)} if known else {})
