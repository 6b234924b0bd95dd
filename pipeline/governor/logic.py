"""The governor: a state machine that grants leases so that no more is generated than can be used.

What goes in: rollouts as they are stored, ledger entries, the trainer's step, stream sizes, and requests for leases.
What comes out: replies. The invariant this file alone guarantees: it grants nothing that would make the sequences
granted, stored without an outcome, or in a batch not yet trained exceed (max_staleness + 1) x batch_size, so nothing
older than max_staleness steps can pile up. Leased groups may always publish, a late one too, so only what comes late or
without a lease can pass the bound. A group that was generated without a lease and is too old for every batch to come
takes part in none of that: it is stored, and dropped by the next entry of the ledger. A lease that is not renewed
counts until it is certain that nothing was stored under it in time: the passing of time alone ends none, nor does a
time in which the governor was cut off and could not hear that it is renewed. Time is an argument, seconds on any clock
that does not jump; it is never read here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.governor.env_fairness import EnvFairness
from lachesis.pipeline.ledger.producer_dedup import ResolvedSet
from lachesis.pipeline.retention.budget import Budget, ByteReservation
from lachesis.schemas.control import AdmissionStatus, LeaseReply, LeaseRequest
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.planning_header import Plan

__all__ = ["Governor", "Lease"]

_MIN_AWAY_S = 2.0
"""Seconds without contact that no producer would notice, whatever a lease lasts."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to generate one group of at most `sequences` and `bytes`, until `expires_s` unless renewed.

    `outdated`: the group exists, and is too old for every batch to come.
    """

    id: str
    env: str
    sequences: int
    bytes: int
    expires_s: float
    outdated: bool = False


@dataclass(frozen=True, slots=True)
class _StoredGroup:
    """`sequences` that count against the capacity: none of an outdated group."""

    env: str
    sequences: int
    room: ByteReservation


class Governor:
    """`term` names this life of the governor and keeps its lease ids apart from others'; `grants_from_s`: see
    `wait_until`. `steps`: of the run, each of which trains on one batch; None: it goes on."""

    def __init__(
        self,
        config: FlowConfig,
        batching: BatchingConfig,
        *,
        term: str,
        grants_from_s: float = -math.inf,
        steps: int | None = None,
    ) -> None:
        self.config = config
        self._steps = math.inf if steps is None else steps
        self.capacity = (batching.max_staleness + 1) * batching.batch_size
        self._max_staleness = batching.max_staleness
        self._batch_size = batching.batch_size
        self._term = term
        self._grants_from_s = grants_from_s
        self._stored: dict[int, _StoredGroup] = {}
        self._resolved = ResolvedSet()
        self._last_rollout = 0
        self._last_member = 0
        self._contact_s: float | None = None
        self._seen_s = -math.inf
        self._last_entry = -1
        self._batches: dict[int, int] = {}
        self._halted: dict[str, str] = {}
        self._next_batch = 0
        self._trained = 0
        self._leases: dict[tuple[str, str], Lease] = {}  # by environment and id, which others can guess
        self._shares = EnvFairness(config, self.capacity, self.capacity - self._batch_size, batching.mix)
        self.budget = Budget(config)
        self._wanting = False
        self._counts = dict.fromkeys(("granted", "refused", "expired", "late"), 0)

    # facts

    def member(self, seq: int, env: str, plan: Plan, now_s: float) -> None:
        """A rollout is stored at `seq`: it counts from now on, and its lease no longer does."""
        self._saw(seq)
        lease = self._end(plan.lease, env)
        if lease is not None:
            self.budget.landed(now_s, lease.bytes)
        elif plan.lease is not None and seq > self._last_member:
            self._counts["late"] += 1
        self._last_member = max(self._last_member, seq)
        if seq not in self._resolved and seq not in self._stored:
            counted = 0 if lease is not None and lease.outdated else plan.sequences
            room = ByteReservation.of(self.config, sequences=plan.sequences, tokens=plan.tokens)
            stored = self._stored[seq] = _StoredGroup(env, counted, room)
            self._shares.hold(env, counted)
            self.budget.promise(stored.room)

    def unreadable(self, seq: int) -> None:
        """The message at `seq` is no rollout: it takes no capacity; the ledger says what became of it."""
        self._saw(seq)

    def _saw(self, seq: int) -> None:
        self._last_rollout = max(self._last_rollout, seq)
        self._wanting = False

    def entry(self, entry: LedgerEntry) -> None:
        """Apply a new ledger entry: resolved groups stop counting, unless they wait in a batch."""
        self._resolved = ResolvedSet(entry.watermark, entry.resolved)
        self._last_rollout = max(self._last_rollout, entry.watermark)
        self._last_entry = entry.index
        self._wanting = False
        for seq in [seq for seq in self._stored if seq in self._resolved]:
            stored = self._stored.pop(seq)
            self._shares.release(stored.env, stored.sequences)
            self.budget.release(stored.room)
        self._next_batch = entry.next_batch
        if entry.batch is not None and entry.batch.number >= self._trained:
            self._batches[entry.batch.number] = entry.batch.sequences

    def trained(self, step: int) -> None:
        """The trainer's weights hold every batch below `step`. A trainer that starts again may step back."""
        self._trained = step
        self._wanting = False
        self._batches = {number: size for number, size in self._batches.items() if number >= step}

    def halt(self, env: str, reason: str | None) -> None:
        """Grant nothing more to `env`, for `reason`; None: do again. Leases that it has may still be used."""
        if reason is None:
            self._halted.pop(env, None)
        else:
            self._halted[env] = reason

    def usage(self, streams: Mapping[str, StreamUsage], now_s: float) -> None:
        """Record the streams' usage as of `now_s`, and the run's share; None: all that is left."""
        self.budget.update(now_s, streams)

    def record_contact(self, now_s: float) -> None:
        """The broker answered, or a request came.

        After a while without either, producers get a lease period to renew what they hold.
        """
        away_s = now_s - self._contact_s if self._contact_s is not None else 0.0
        if away_s > max(_MIN_AWAY_S, self.config.lease_s / 4):  # a producer renews four times
            until_s = now_s + self.config.lease_s
            self._leases = {name: replace(lease, expires_s=until_s) for name, lease in self._leases.items()}
            if self.waits_for_old_leases:  # it could not take over the leases of earlier lives either
                self._grants_from_s = until_s
        self._contact_s = now_s

    def wait_until(self, grants_from_s: float) -> None:
        """Grant nothing before everything stored until `grants_from_s` is known.

        Until then producers renew what they hold from earlier lives, which is taken over, or store what was made of it.
        """
        self._grants_from_s = grants_from_s

    @property
    def waits_for_old_leases(self) -> bool:
        """Whether leases of earlier lives may be held of which nothing is known yet."""
        return self._seen_s < self._grants_from_s

    def is_due(self, now_s: float) -> bool:
        """Whether something waits for `seen`: leases whose time is over, or all that want one after a restart."""
        waited = self.waits_for_old_leases and self._grants_from_s <= now_s
        return waited or any(lease.expires_s <= now_s for lease in self._leases.values())

    def mark_seen_until(self, now_s: float) -> None:
        """Record that all rollouts stored before `now_s` are known.

        A lease that had expired by then is unused.

        Its producer is gone, or cut off; should it publish after all, that counts when it is stored.
        """
        self._seen_s = now_s
        for lease in [lease for lease in self._leases.values() if lease.expires_s <= now_s]:
            self._end(lease.id, lease.env)
            self._counts["expired"] += 1

    # requests

    def answer_request(self, request: LeaseRequest, now_s: float) -> LeaseReply:
        """Answer a request. A refusal says why and when to ask again."""
        self.record_contact(now_s)
        match request.op:
            case "acquire":
                return self._acquire(request, now_s)
            case "renew":
                return self._renew(request, now_s)
        self._end(request.lease, request.env)
        return LeaseReply(granted=True, lease=request.lease)

    def _acquire(self, request: LeaseRequest, now_s: float) -> LeaseReply:
        reason = self._refusal(request, now_s)
        if reason is not None:
            self._counts["refused"] += 1
            retry_s, never = max(self.config.retry_s, self._wait_s(now_s)), self._never_reason(request) is not None
            closed = self._closed(request.env) is not None
            return LeaseReply(granted=False, retry_s=retry_s, reason=reason, never=never, closed=closed)
        self._counts["granted"] += 1
        if self._is_outdated(request):
            self._shares.lose_outdated(request.env, request.sequences, now_s)
        return self._begin(f"{self._term}.{self._counts['granted']}", request, now_s)

    def _renew(self, request: LeaseRequest, now_s: float) -> LeaseReply:
        name = request.lease or ""
        lease = self._leases.get((request.env, name))
        if lease is not None:
            self._leases[request.env, name] = replace(lease, expires_s=now_s + self.config.lease_s)
            return LeaseReply(granted=True, lease=name, expires_s=self.config.lease_s)
        # an earlier life may have granted it: the producer says what that was
        outdated = self._is_outdated(request)
        if self.waits_for_old_leases and self._may_be_granted(request.sequences, request.bytes, outdated=outdated):
            return self._begin(name, request, now_s)
        reason = "there is no such lease; it ended or was used. What was generated under it may still be published"
        return LeaseReply(granted=False, lease=name, reason=reason)

    def _may_be_granted(self, sequences: int, size: int, *, outdated: bool) -> bool:
        """Whether an earlier life can have granted that, beside what was taken over from it already.

        What came late has passed the bound, so what is stored and batched says nothing about it.
        """
        room = ByteReservation.of(self.config, sequences=sequences, bytes_=size)
        fits = 1 <= sequences <= self._batch_size and (outdated or self.leased + sequences <= self.capacity)
        return fits and size >= 1 and self.budget.reason_never_possible(room) is None

    def _begin(self, name: str, request: LeaseRequest, now_s: float) -> LeaseReply:
        outdated, expires_s = self._is_outdated(request), now_s + self.config.lease_s
        lease = Lease(name, request.env, request.sequences, request.bytes, expires_s, outdated)
        self._wanting = False
        self._leases[lease.env, name] = lease
        if not outdated:
            self._shares.hold(lease.env, lease.sequences)
        self.budget.promise(ByteReservation.of(self.config, sequences=lease.sequences, bytes_=lease.bytes))
        return LeaseReply(granted=True, lease=name, expires_s=self.config.lease_s)

    def _end(self, name: str | None, env: str) -> Lease | None:
        """End a lease of `env`, if it has one of that id."""
        lease = self._leases.pop((env, name or ""), None)
        if lease is None:
            return None
        self._wanting = False
        if not lease.outdated:
            self._shares.release(lease.env, lease.sequences)
        self.budget.release(ByteReservation.of(self.config, sequences=lease.sequences, bytes_=lease.bytes))
        return lease

    def _refusal(self, request: LeaseRequest, now_s: float) -> str | None:
        """Return why nothing can be granted, None if it can."""
        never = self._never_reason(request)
        if never is not None:
            return never
        closed = self._closed(request.env)
        if closed is not None:
            return closed
        if self.waits_for_old_leases:
            return f"the governor started again and waits {self._wait_s(now_s):.1f} s for leases it cannot know"
        if self.budget.is_blind(now_s):
            return "the size of the streams is unknown: the broker does not answer"
        outdated = self._is_outdated(request)
        if request.outdated_only and not outdated:
            return "the group may still be trained on, so it waits for its environment's turn"
        room = ByteReservation.of(self.config, sequences=request.sequences, bytes_=request.bytes)
        reason = self.budget.refusal_reason(room)
        if reason is None and not outdated:
            reason = self._expected_age_reason(request)
            if reason is not None:
                self._shares.keep_turn(request.env, request.sequences, now_s)
            else:
                free = self.capacity - self.outstanding
                reason = self._shares.refusal_reason(request.env, request.sequences, free, now_s)
        self._wanting = reason is not None
        return reason

    def _expected_age_reason(self, request: LeaseRequest) -> str | None:
        """Return why a group that exists should not use up room: all that is stored already comes into batches first,
        and by then it is too old. None: it is not, or is still to be generated."""
        ahead = self._next_batch + self.accepted // self._batch_size
        if request.policy_step is None or request.policy_step + self._max_staleness >= ahead:
            return None
        return f"made by policy step {request.policy_step}, it would be too old for the batch {ahead} that has room"

    def _is_outdated(self, request: LeaseRequest) -> bool:
        """Whether a lease is wanted for a group because the batcher will drop it, whichever batch comes next."""
        step = request.policy_step if request.outdated_only else None
        return step is not None and step + self._max_staleness < self._next_batch

    def _never_reason(self, request: LeaseRequest) -> str | None:
        """Return why what is asked for can never be granted, None if it can be some time."""
        if request.sequences > self._batch_size:
            return (
                f"a group of {request.sequences} sequences can never be admitted: a batch has {self._batch_size}; "
                "make groups smaller, or batches larger"
            )
        room = ByteReservation.of(self.config, sequences=request.sequences, bytes_=request.bytes)
        return self.budget.reason_never_possible(room)

    def _closed(self, env: str) -> str | None:
        """Return why nothing at all is granted to an environment now."""
        if self._next_batch >= self._steps:
            return f"the batches of all {self._steps} steps are formed: no more rollouts are needed"
        return self._halted.get(env)

    def _wait_s(self, now_s: float) -> float:
        return min(max(0.0, self._grants_from_s - now_s), self.config.lease_s) if self.waits_for_old_leases else 0.0

    # figures

    @property
    def leased(self) -> int:
        """Sequences granted and not stored yet, without those of outdated groups."""
        return sum(lease.sequences for lease in self._leases.values() if not lease.outdated)

    @property
    def accepted(self) -> int:
        """Sequences stored that have no outcome yet, without those of outdated groups."""
        return sum(stored.sequences for stored in self._stored.values())

    @property
    def untrained(self) -> int:
        """Sequences in batches that are not in the weights yet; a batch never seen here counts in full."""
        never_seen = max(0, self._next_batch - self._trained - len(self._batches))
        return sum(self._batches.values()) + never_seen * self._batch_size

    @property
    def outstanding(self) -> int:
        """Number of sequences that the capacity bounds."""
        return self.leased + self.accepted + self.untrained

    @property
    def blocked(self) -> bool:
        """Whether somebody was refused, and nothing is under way that could change that.

        Then only a batch smaller than it should be can free capacity.
        """
        return self._wanting and not self._leases and self.untrained == 0

    def status(self, run: str) -> AdmissionStatus:
        """Return what the batcher is told: whether nothing more can be admitted, and what that is known from."""
        return AdmissionStatus(
            run=run, blocked=self.blocked, last_rollout=self._last_rollout, last_entry=self._last_entry
        )

    def metrics(self) -> dict[str, float]:
        """Return figures for monitoring under `flow/`.

        Once the last step is taken nothing is outstanding any more.
        """
        bound = {"flow/capacity": self.capacity, "flow/outstanding": self.outstanding}
        return {
            **(bound if self._trained < self._steps else {}),
            "flow/leased": self.leased,
            "flow/accepted": self.accepted,
            "flow/untrained": self.untrained,
            "flow/blocked": float(self.blocked),
            **{f"flow/{name}": count for name, count in self._counts.items()},
            **({} if self.budget.disk_bytes is None else {"flow/disk_bytes": self.budget.disk_bytes}),
            **{f"flow/fill/{stream}": share for stream, share in self.budget.fill().items()},
        }
