"""Decides which history is deleted on request, by age or size. Pure.

The governor trims only to make room. A person may also want to delete history that is never trimmed: evaluations, the
ledger's beginning, re-scored revisions. The rule is that of `retention_floor`: nothing at or above a claim on its
subject is deleted, and the last message of a subject stays, because its writer starts again there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lachesis.pipeline.retention import retention_floor
from lachesis.pipeline.retention.retention_floor import RetentionClaim, RetentionInputs
from lachesis.schemas import subjects
from lachesis.schemas.subjects import EVENTS, LEDGER

__all__ = [
    "SUBJECT_WRITER",
    "GcDecider",
    "GcDecision",
    "HeldBack",
    "OfflineTrainer",
    "StoredHeader",
    "StoredRevision",
    "collectable",
    "ledger_claims",
    "old_revisions",
]

SUBJECT_WRITER = "its writer, to start from"
"""Holder of the last message of each subject, as shown to people."""


class StoredHeader(NamedTuple):
    """A stored message without its data; `size` in bytes is an estimate."""

    seq: int
    subject: str
    time_ns: int
    size: int


@dataclass(slots=True)
class HeldBack:
    """What one holder keeps from deletion: bytes, messages, and the first of them."""

    bytes: int = 0
    messages: int = 0
    first: int = 0


@dataclass(slots=True)
class GcDecision:
    """What is deleted from a stream: by subject, everything below a sequence. `held` is by holder."""

    stream: str
    before: dict[str, int] = field(default_factory=dict)
    messages: int = 0
    bytes: int = 0
    held: dict[str, HeldBack] = field(default_factory=dict)


def collectable(stream: str, run: str, revision: str, environments: Iterable[str], ledger: str | None) -> list[str]:
    """Return the subjects that may be deleted on request.

    These are the subjects that the governor trims, evaluations, and the ledger if named.
    """
    names = list(environments)
    found = retention_floor.trimmable(stream, run, revision, names)
    if stream == EVENTS:
        found += [subjects.event("eval", run, revision, env) for env in names]
    if stream == LEDGER and ledger is not None:
        found.append(ledger)
    return found


def ledger_claims(facts: RetentionInputs, ledger: str, resumes_at: int) -> list[RetentionClaim]:
    """Return the claims on a ledger.

    A trainer that starts again reads from `resumes_at` on (1: it has no checkpoint): the entry before its checkpoint's
    position proves that the ledger is the one it trained on.
    """
    found = [RetentionClaim(LEDGER, ledger, resumes_at, "trainer, for its checkpoint")]
    for env, monitor in (facts.monitors or {}).items():
        found.append(RetentionClaim(LEDGER, ledger, monitor.cursors.get(LEDGER, 1), f"health service, for {env}"))
    return found


class GcDecider:
    """Feed it headers in ascending sequence until it wants no more; `decision` then says what is deleted.

    Messages stored before `born_before_ns` are deleted, and the oldest until `excess` bytes are gone, but no message
    that was stored since `kept_from_ns`. `lasts` has, by subject, the sequence of its last message.
    """

    def __init__(
        self,
        stream: str,
        claims: Sequence[RetentionClaim],
        lasts: Mapping[str, int],
        *,
        born_before_ns: int | None,
        excess: int,
        kept_from_ns: int | None = None,
    ) -> None:
        self.decision = GcDecision(stream)
        self._claims = claims
        self._lasts = lasts
        self._born_before_ns = born_before_ns
        self._excess = excess
        self._kept_from_ns = kept_from_ns
        self._lowest: dict[str, RetentionClaim | None] = {}

    def decide_message(self, header: StoredHeader) -> bool:
        """Decide about a message, and return whether the next one matters."""
        decision, time_ns = self.decision, header.time_ns
        old = self._born_before_ns is not None and time_ns < self._born_before_ns
        if not old and decision.bytes >= self._excess:
            return False  # all that follow are younger, and enough is gone
        if self._kept_from_ns is not None and time_ns >= self._kept_from_ns:
            return False
        claim = self._claim(header.subject)
        if claim is not None and header.seq >= claim.needs:
            _hold(decision, claim.holder, header)
        elif header.seq >= self._lasts.get(header.subject, 0):
            _hold(decision, SUBJECT_WRITER, header)
        else:
            decision.before[header.subject] = header.seq + 1
            decision.messages += 1
            decision.bytes += header.size
        return True

    def _claim(self, subject: str) -> RetentionClaim | None:
        if subject not in self._lowest:
            self._lowest[subject] = next(
                iter(retention_floor.claims_on(self._claims, self.decision.stream, subject)), None
            )
        return self._lowest[subject]


def _hold(decision: GcDecision, holder: str, header: StoredHeader) -> None:
    held = decision.held.setdefault(holder, HeldBack(first=header.seq))
    held.bytes += header.size
    held.messages += 1


class StoredRevision(NamedTuple):
    """A re-scored revision of the run: its size, when it was last written, and which process works on it.

    `held` None: no process does.
    """

    name: str
    messages: int
    bytes: int
    newest_ns: int
    held: str | None


class OfflineTrainer(NamedTuple):
    """An offline trainer: the size of its ledger, how far it has come, and whether it is at work."""

    name: str
    revision: str
    trained: int
    batches: int
    messages: int
    bytes: int
    works: bool

    @property
    def needs(self) -> str | None:
        """Return why it needs its revision; None once it has trained on all of it."""
        if self.trained >= self.batches:
            return None
        return f"trainer {self.name}, {self.trained} of {self.batches} batches done (--trainer lets it go)"


def old_revisions(
    revisions: Iterable[StoredRevision], named: Iterable[str], *, born_before_ns: int | None, excess: int
) -> list[StoredRevision]:
    """Return the revisions to delete as a whole.

    These are the named ones, those last written before `born_before_ns`, and the oldest until `excess` bytes are gone;
    never one that a process works on.
    """
    wanted, found, gone = set(named), list[StoredRevision](), 0
    for one in sorted(revisions, key=lambda one: one.newest_ns):
        old = born_before_ns is not None and one.newest_ns < born_before_ns
        if one.held is None and (one.name in wanted or old or gone < excess):
            found.append(one)
            gone += one.bytes
    return found
