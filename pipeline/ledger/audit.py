"""Verifies a ledger entry by entry. Pure.

It checks the chain, the watermark, that each rollout has one outcome, staleness and advantages. It takes the messages
on the ledger's subject in stream order, and the server's count of them, and returns problems in words. It remembers one
entry and a few counts, so each check costs only what was written since the last one.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.producer_dedup import ResolvedSet
from lachesis.schemas.ledger import LedgerEntry

__all__ = [
    "LedgerAudit",
    "LedgerProblem",
    "LedgerRules",
    "batch_number",
    "newest_group",
    "settled_again",
    "settled_rollouts",
]

ProblemKind = Literal["chain", "unreadable", "watermark", "outcomes", "staleness", "advantages"]
_SUM_TOLERANCE = 1e-6
"""Largest allowed mean of a group's advantages, as a share of the largest of them (or of 1)."""


def settled_rollouts(entry: LedgerEntry) -> list[int]:
    """Return the sequences of ROLLOUTS that an entry names an outcome of, its batch's included."""
    return [outcome.seq for outcome in entry.outcomes] + [
        ref.seq for ref in (entry.batch.groups if entry.batch else [])
    ]


def newest_group(entry: LedgerEntry) -> tuple[int, str] | None:
    """Return sequence and group of the newest rollout that an entry names by its group, if any."""
    named = {ref.seq: ref.group for ref in entry.batch.groups} if entry.batch else {}
    named |= {outcome.seq: outcome.group for outcome in entry.outcomes if outcome.group is not None}
    return max(named.items(), default=None)


def settled_again(entry: LedgerEntry, before: LedgerEntry | None) -> list[int]:
    """Return the rollouts that an entry settles twice, or that the entry before it had settled, ascending."""
    settled = ResolvedSet(before.watermark, before.resolved) if before is not None else ResolvedSet()
    return sorted(seq for seq, times in Counter(settled_rollouts(entry)).items() if times > 1 or seq in settled)


def batch_number(entry: LedgerEntry) -> int:
    """Return the number of an entry's batch, or of the next one if it has none."""
    return entry.batch.number if entry.batch else entry.next_batch


class LedgerProblem(NamedTuple):
    """A problem of a ledger. `breaks`: the ledger can no longer be relied on."""

    kind: ProblemKind
    text: str

    @property
    def breaks(self) -> bool:
        return self.kind not in {"staleness", "advantages"}


@dataclass(frozen=True, slots=True)
class LedgerRules:
    """Rules that the run's settings imply for entries written since `since_ns` (Unix time); older ones had other
    settings.

    `max_staleness`, `staleness_of`: see `BatchingConfig`. `zero_mean`: environments whose estimator makes the
    advantages of each group add up to 0 in the ledger.
    """

    max_staleness: int
    zero_mean: Collection[str] = ()
    since_ns: int = 0
    staleness_of: Literal["newest", "oldest"] = "oldest"


class LedgerAudit:
    """Give `verify_entry` each message, then give `count` the server's count. `next_seq` is where to read on.

    `gone_below`: entries below this sequence of LEDGER may have been deleted on purpose. `known`: the position up to
    which the ledger was verified before, if all is verified again.
    """

    def __init__(
        self,
        subject: str,
        rules: LedgerRules | None = None,
        *,
        gone_below: int = 1,
        known: LedgerPosition | None = None,
    ) -> None:
        self.next_seq = 1
        self.position = LedgerPosition()
        self.messages = 0
        """Messages read on the subject, including those that are no entries."""
        self._subject = subject
        self._rules = rules
        self._gone_below = gone_below
        self._known = known or LedgerPosition()
        self._last: LedgerEntry | None = None
        self._last_seq = 0
        self._unreadable = 0  # as reported last

    def verify_entry(self, seq: int, entry: LedgerEntry | None, previous: int | None) -> list[LedgerProblem]:
        """Verify the message at `seq`, which names `previous` as the sequence of the entry before it.

        `entry` None: the message is no entry.
        """
        self.next_seq = seq + 1
        self.messages += 1
        if entry is None:
            return []
        problems = self._chain(seq, entry, previous)
        if entry.index < self.position.entries:
            return problems  # the entry belongs to another history
        if not problems:
            problems = [*self._watermark(entry), *self._outcomes(entry), *self._settings(entry)]
        self.position = LedgerPosition(entry.index + 1, entry.digest())
        self._last, self._last_seq = entry, seq
        if self.position.entries == self._known.entries and self.position != self._known:
            text = f"entry {entry.index} was {self._known.digest[:12]} before, and is {entry.digest()[:12]} now"
            problems.append(self._problem("chain", text))
        return problems

    def count(self, messages: int) -> list[LedgerProblem]:
        """Compare what was read with the `messages` that the server counted before that."""
        missing = messages - self.messages
        reported, self._unreadable = self._unreadable, max(0, missing)
        held, known = self.position.entries, self._known.entries
        self._known = LedgerPosition()
        if missing > reported:
            text = f"the server counts {messages} messages and cannot read {missing} of them"
            return [self._problem("unreadable", text)]
        if held < known and not missing:
            text = f"it held {known} entries and holds {held} now: the server lost what it had acknowledged"
            return [self._problem("chain", text)]
        return []

    def _problem(self, kind: ProblemKind, text: str) -> LedgerProblem:
        return LedgerProblem(kind, f"{self._subject}: {text}")

    def _chain(self, seq: int, entry: LedgerEntry, previous: int | None) -> list[LedgerProblem]:
        known = self.position
        begins = f"entry {entry.index} at sequence {seq}"
        if entry.index < known.entries:
            text = f"{begins} comes after entry {known.entries - 1}: another writer has begun a second history"
            return [self._problem("chain", text)]
        if entry.index > known.entries:
            if self._last is None and previous is not None and previous < self._gone_below:
                return []  # the entries before were deleted on purpose
            gone = f"{known.entries} to {entry.index - 1}" if entry.index > known.entries + 1 else str(known.entries)
            where = f"; the last of them was at sequence {previous}" if previous else ""
            return [self._problem("unreadable", f"entry {gone} is gone: {begins} follows{where}")]
        if entry.previous != known.digest:
            text = f"{begins} follows {entry.previous[:12]}, but the entry before it is {known.digest[:12]}"
            return [self._problem("chain", text)]
        if self._last is not None and previous not in {None, self._last_seq}:
            text = f"{begins} says that the entry before it is at sequence {previous}; it is at {self._last_seq}"
            return [self._problem("chain", text)]
        return []

    def _watermark(self, entry: LedgerEntry) -> list[LedgerProblem]:
        last = self._last
        if last is None:
            return []
        problems = []
        if entry.watermark < last.watermark:
            text = f"entry {entry.index} has watermark {entry.watermark}, after {last.watermark}: it went back"
            problems.append(self._problem("watermark", text))
        if (number := batch_number(entry)) != last.next_batch:
            text = f"entry {entry.index} has batch {number} where {last.next_batch} follows"
            problems.append(self._problem("chain", text))
        return problems

    def _outcomes(self, entry: LedgerEntry) -> list[LedgerProblem]:
        problems = []
        after = ResolvedSet(entry.watermark, entry.resolved)
        if (self._last is not None or not entry.index) and (again := settled_again(entry, self._last)):
            text = f"entry {entry.index} gives rollouts a second outcome: sequences {_some(again)} of ROLLOUTS"
            problems.append(self._problem("outcomes", text))
        if unsettled := sorted(seq for seq in settled_rollouts(entry) if seq not in after):
            text = f"entry {entry.index} settles rollouts and calls them open: sequences {_some(unsettled)} of ROLLOUTS"
            problems.append(self._problem("outcomes", text))
        return problems

    def _settings(self, entry: LedgerEntry) -> list[LedgerProblem]:
        rules, batch = self._rules, entry.batch
        if rules is None or batch is None or entry.written_ns < rules.since_ns:
            return []
        problems = []
        newest = rules.staleness_of == "newest"
        steps = [ref.last_step if newest else ref.policy_step for ref in batch.groups]
        oldest = max((batch.number - step for step in steps), default=0)
        if oldest > rules.max_staleness:
            text = f"batch {batch.number} holds a group {oldest} steps old, where {rules.max_staleness} are allowed"
            problems.append(self._problem("staleness", text))
        if entry.promoted:
            return problems  # another revision computes the advantages
        for ref in batch.groups:
            values = [value for value in ref.advantages if value is not None]
            limit = _SUM_TOLERANCE * max(1.0, *map(abs, values)) * len(values) if values else 0.0
            if ref.env in rules.zero_mean and abs(math.fsum(values)) > limit:
                text = f"batch {batch.number}: the advantages of group {ref.group} add up to {math.fsum(values):.3g}"
                problems.append(self._problem("advantages", text))
        return problems


def _some(seqs: list[int]) -> str:
    shown = ", ".join(map(str, seqs[:4]))
    return f"{shown} and {len(seqs) - 4} more" if len(seqs) > 4 else shown
