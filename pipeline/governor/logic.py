"""The governor: a state machine that grants leases so that no more is generated than can be used.

It takes stored rollouts, ledger entries, the trainer's step, stream sizes and requests for leases, and returns replies.

Only this file guarantees the invariant: it grants nothing that would make the sequences granted, stored without an
outcome, or in a batch not yet trained exceed (max_staleness + 1) x batch_size. So groups older than max_staleness steps
cannot pile up. A leased group may always be published, even late, so only late groups and groups without a lease can
pass the bound. A group that was generated without a lease and is too old for every future batch does not count: it is
stored, and the next entry of the ledger drops it. A lease that is not renewed counts until it is certain that nothing
was stored under it in time: passing time alone does not end it, nor does a time in which the governor was cut off and
could not receive renewals. Time is an argument, seconds on any clock that does not jump; it is never read here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.governor.env_fairness import EnvFairness
from lachesis.pipeline.ledger.producer_dedup import ResolvedSet
from lachesis.pipeline.retention.budget import Budget, ByteReservation
from lachesis.schemas.control import RENEWALS_OF_A_LEASE, AdmissionStatus, LeaseReply, LeaseRequest
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.planning_header import Plan

__all__ = ["Governor", "Lease"]

_IDLE_RETRIES = 3.0
"""Retries after which room that is kept for other environments is granted, if nothing at all is under way."""
_MIN_AWAY_S = 2.0
"""Seconds without contact that no producer would notice, however long a lease lasts."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to generate one group of at most `sequences` and `bytes`, until `expires_s` unless renewed.

    `outdated`: the group exists, and is too old for every future batch. `calls`: bytes that its calls may take.
    `since_s`: when it was granted.
    """

    id: str
    env: str
    sequences: int
    bytes: int
    expires_s: float
    outdated: bool = False
    calls: int = 0
    since_s: float = 0.0

    def room(self, config: FlowConfig) -> ByteReservation:
        """Return the bytes that may still be stored under it."""
        return ByteReservation.of(config, sequences=self.sequences, bytes_=self.bytes, calls=self.calls)


@dataclass(frozen=True, slots=True)
class _StoredGroup:
    """`sequences` that count against the capacity: 0 for an outdated group."""

    env: str
    sequences: int
    room: ByteReservation


class Governor:
    """`term` names this life of the governor and keeps its lease ids apart from others'. `grants_from_s`: see
    `wait_until`. `steps`: the steps of the run, each of which trains on one batch; None: no end is set.
    """

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
        self._leases: dict[tuple[str, str], Lease] = {}  # by environment and id, because others can guess an id
        self._shares = EnvFairness(config, self.capacity, self.capacity - self._batch_size, batching.mix)
        self.budget = Budget(config)
        self._wanting = False
        self._idle_s: float | None = None
        """Since when requests have been refused for the shares alone, though nothing is under way."""
        self._lost_groups = 0
        """Leases that ran out where no calls are recorded."""
        self._lost_s = 0.0
        """Seconds from grants to last renewals of these leases, times their sequences: at most what kills have cost."""
        self._counts = dict.fromkeys(("granted", "refused", "expired", "late"), 0)
        self.on_change: Callable[[], None] = lambda: None
        """Called at each change after which a refused request may be granted; see `reconsider`."""

    # facts

    def member(self, seq: int, env: str, plan: Plan, now_s: float) -> None:
        """Record that a rollout is stored at `seq`: it counts from now on, and its lease no longer does."""
        self._saw(seq)
        lease = self._end(plan.lease, env)
        if lease is not None:
            self.budget.landed(now_s, lease.bytes)
        elif plan.lease is not None and seq > self._last_member:
            self._counts["late"] += 1
        self._last_member = max(self._last_member, seq)
        if seq not in self._resolved and seq not in self._stored:
            counted = 0 if lease is not None and lease.outdated else plan.samples
            room = ByteReservation.of(self.config, sequences=plan.samples, tokens=plan.tokens)
            stored = self._stored[seq] = _StoredGroup(env, counted, room)
            self._shares.hold(env, counted)
            self.budget.promise(stored.room)

    def record_unreadable(self, seq: int) -> None:
        """Record that the message at `seq` is no rollout: it takes no capacity; the ledger has its outcome."""
        self._saw(seq)

    def _saw(self, seq: int) -> None:
        self._last_rollout = max(self._last_rollout, seq)
        self._note_change()

    def _note_change(self) -> None:
        """Record that something happened, after which a refused request may be granted."""
        self._wanting, self._idle_s = False, None
        self.on_change()

    def entry(self, entry: LedgerEntry) -> None:
        """Apply a new ledger entry: resolved groups stop counting, unless they wait in a batch."""
        self._resolved = ResolvedSet(entry.watermark, entry.resolved)
        self._last_rollout = max(self._last_rollout, entry.watermark)
        self._last_entry = entry.index
        self._note_change()
        for seq in [seq for seq in self._stored if seq in self._resolved]:
            stored = self._stored.pop(seq)
            self._shares.release(stored.env, stored.sequences)
            self.budget.release(stored.room)
        self._next_batch = entry.next_batch
        if entry.batch is not None and entry.batch.number >= self._trained:
            self._batches[entry.batch.number] = entry.batch.sequences

    def trained(self, step: int) -> None:
        """Record that the trainer's weights hold every batch below `step`, which may be lower after a restart."""
        self._trained = step
        self._note_change()
        self._batches = {number: size for number, size in self._batches.items() if number >= step}

    def halt(self, env: str, reason: str | None) -> None:
        """Grant nothing more to `env`, for `reason`; None: grant again. Leases that it has may still be used."""
        if reason is None:
            self._halted.pop(env, None)
        else:
            self._halted[env] = reason

    def usage(self, streams: Mapping[str, StreamUsage], now_s: float) -> None:
        """Record the streams' usage as of `now_s`."""
        self.budget.update(now_s, streams)

    def record_contact(self, now_s: float) -> None:
        """Record that the broker answered or a request came.

        After a while without either, producers get a lease period to renew their leases.
        """
        away_s = now_s - self._contact_s if self._contact_s is not None else 0.0
        if away_s > max(_MIN_AWAY_S, self.config.lease_s / 4):  # a producer renews four times
            until_s = now_s + self.config.lease_s
            self._leases = {name: replace(lease, expires_s=until_s) for name, lease in self._leases.items()}
            if self.waits_for_old_leases:  # then it could not take over leases of earlier lives either
                self._grants_from_s = until_s
        self._contact_s = now_s

    def wait_until(self, grants_from_s: float) -> None:
        """Grant nothing before everything stored until `grants_from_s` is known.

        Until then producers renew leases of earlier lives, which are taken over, or store groups made under them.
        """
        self._grants_from_s = grants_from_s

    @property
    def waits_for_old_leases(self) -> bool:
        """Whether there may be leases of earlier lives that are not known yet."""
        return self._seen_s < self._grants_from_s

    def is_due(self, now_s: float) -> bool:
        """Whether something waits for `mark_seen_until`: expired leases, or all requests after a restart."""
        waited = self.waits_for_old_leases and self._grants_from_s <= now_s
        return waited or any(lease.expires_s <= now_s for lease in self._leases.values())

    def mark_seen_until(self, now_s: float) -> None:
        """Record that all rollouts stored before `now_s` are known.

        A lease that had expired by then is unused: its producer is gone, or cut off. If the producer publishes after
        all, the rollout counts when it is stored.
        """
        self._seen_s = now_s
        for lease in [lease for lease in self._leases.values() if lease.expires_s <= now_s]:
            self._end(lease.id, lease.env)
            self._counts["expired"] += 1
            if not lease.calls:  # else another process goes on with it
                renewed_s, between_s = lease.expires_s - self.config.lease_s, self.config.lease_s / RENEWALS_OF_A_LEASE
                self._lost_groups += 1
                self._lost_s += lease.sequences * (renewed_s + between_s - lease.since_s)

    # requests

    def answer_request(self, request: LeaseRequest, now_s: float) -> LeaseReply:
        """Answer a request. A refusal says why and when to retry."""
        self.record_contact(now_s)
        match request.op:
            case "acquire":
                return self._acquire(request, now_s)
            case "renew":
                return self._renew(request, now_s)
        self._end(request.lease, request.env)
        return LeaseReply(granted=True, lease=request.lease)

    def reconsider(self, request: LeaseRequest, now_s: float) -> LeaseReply:
        """Answer a request for a lease again that was refused and waits. It is no sign of the producer."""
        return self._acquire(request, now_s)

    def _acquire(self, request: LeaseRequest, now_s: float) -> LeaseReply:
        reason = self._refusal(request, now_s)
        if reason is not None:
            self._counts["refused"] += 1
            retry_s, never = max(self.config.retry_s, self._wait_s(now_s)), self._never_reason(request) is not None
            closed, contended = self._closed(request.env) is not None, self._shares.is_contended(request.env, now_s)
            return LeaseReply(
                granted=False, retry_s=retry_s, reason=reason, never=never, closed=closed, contended=contended
            )
        self._counts["granted"] += 1
        reply = self._begin(f"{self._term}.{self._counts['granted']}", request, now_s)
        return reply.replace(contended=self._shares.is_contended(request.env, now_s))

    def _renew(self, request: LeaseRequest, now_s: float) -> LeaseReply:
        name = request.lease or ""
        lease = self._leases.get((request.env, name))
        if lease is not None:
            self._leases[request.env, name] = replace(lease, expires_s=now_s + self.config.lease_s)
            return LeaseReply(granted=True, lease=name, expires_s=self.config.lease_s)
        # an earlier life may have granted it: the producer says how much
        outdated = self._is_outdated(request)
        if self.waits_for_old_leases and self._may_be_granted(request, outdated=outdated):
            return self._begin(name, request, now_s)
        reason = "there is no such lease; it ended or was used. What was generated under it may still be published"
        return LeaseReply(granted=False, lease=name, reason=reason)

    def _may_be_granted(self, request: LeaseRequest, *, outdated: bool) -> bool:
        """Whether an earlier life can have granted that, in addition to the leases taken over from it already.

        Late groups may have passed the bound, so stored and batched sequences do not count here.
        """
        room, sequences = self._room(request), request.sequences
        fits = 1 <= sequences <= self._batch_size and (outdated or self.leased + sequences <= self.capacity)
        return fits and request.bytes >= 1 and self.budget.reason_never_possible(room) is None

    def _begin(self, name: str, request: LeaseRequest, now_s: float) -> LeaseReply:
        outdated, expires_s = self._is_outdated(request), now_s + self.config.lease_s
        lease = Lease(
            name, request.env, request.sequences, request.bytes, expires_s, outdated, request.calls, since_s=now_s
        )
        self._note_change()
        self._leases[lease.env, name] = lease
        if not outdated:
            self._shares.hold(lease.env, lease.sequences)
        self.budget.promise(lease.room(self.config))
        return LeaseReply(granted=True, lease=name, expires_s=self.config.lease_s)

    def _end(self, name: str | None, env: str) -> Lease | None:
        """End the lease of `env` with that id, if there is one."""
        lease = self._leases.pop((env, name or ""), None)
        if lease is None:
            return None
        self._note_change()
        if not lease.outdated:
            self._shares.release(lease.env, lease.sequences)
        self.budget.release(lease.room(self.config))
        return lease

    def _refusal(self, request: LeaseRequest, now_s: float) -> str | None:
        """Return why the request cannot be granted; None if it can."""
        refusal = self._never_reason(request) or self._closed(request.env)
        if refusal is not None:
            return refusal
        if self.waits_for_old_leases:
            return f"the governor started again and waits {self._wait_s(now_s):.1f} s for leases it cannot know"
        if self.budget.is_blind(now_s):
            return "the size of the streams is unknown: the broker does not answer"
        outdated = self._is_outdated(request)
        if request.outdated_only and not outdated:
            return "the group may still be trained on, so it waits for its environment's turn"
        reason = self.budget.refusal_reason(self._room(request))
        if reason is not None or outdated:
            self._wanting = reason is not None
            return reason
        return self._lack_of_room(request, now_s)

    def _lack_of_room(self, request: LeaseRequest, now_s: float) -> str | None:
        """Return why the capacity has no room for the request; None if it has."""
        reason = self._expected_age_reason(request)
        if reason is not None:
            self._shares.keep_turn(request.env, request.sequences, now_s)
            self._wanting |= self.accepted >= self._batch_size  # else it is outdated, and no batch makes room for it
            return reason
        free = self.capacity - self.outstanding
        reason = self._shares.refusal_reason(request.env, request.sequences, free, now_s)
        if reason is None or request.sequences > free:
            self._wanting = reason is not None
            return reason
        return self._keep_share(request, reason, now_s)

    def _keep_share(self, request: LeaseRequest, reason: str, now_s: float) -> str | None:
        """Return why room that is kept for other environments is not granted; None: it is, as they do not come."""
        if self._leases or self.untrained:
            self._idle_s = None
            return reason
        self._idle_s = now_s if self._idle_s is None else self._idle_s
        if now_s - self._idle_s < _IDLE_RETRIES * self.config.retry_s:
            return reason
        self._shares.grant(request.env, request.sequences, now_s)
        return None

    def _expected_age_reason(self, request: LeaseRequest) -> str | None:
        """Return why an existing group should not use up room; None if it may, or is not generated yet.

        All groups that are stored already are batched first, and by then this one is too old.
        """
        ahead = self._next_batch + self.accepted // self._batch_size
        if request.policy_step is None or request.policy_step + self._max_staleness >= ahead:
            return None
        return f"made by policy step {request.policy_step}, it would be too old for the batch {ahead} that has room"

    def _is_outdated(self, request: LeaseRequest) -> bool:
        """Whether the requested lease is for a group that the batcher will drop, whichever batch comes next."""
        step = request.policy_step if request.outdated_only else None
        return step is not None and step + self._max_staleness < self._next_batch

    def _never_reason(self, request: LeaseRequest) -> str | None:
        """Return why the request can never be granted; None if it can be some time."""
        if request.sequences > self._batch_size:
            return (
                f"a group of {request.sequences} sequences can never be admitted: a batch has {self._batch_size}; "
                "make groups smaller, or batches larger"
            )
        return self.budget.reason_never_possible(self._room(request))

    def _room(self, request: LeaseRequest) -> ByteReservation:
        return ByteReservation.of(self.config, sequences=request.sequences, bytes_=request.bytes, calls=request.calls)

    def _closed(self, env: str) -> str | None:
        """Return why nothing at all is granted to an environment now; None if leases are."""
        if self._next_batch >= self._steps:
            return f"the batches of all {self._steps} steps are formed: no more rollouts are needed"
        return self._halted.get(env)

    def _wait_s(self, now_s: float) -> float:
        return min(max(0.0, self._grants_from_s - now_s), self.config.lease_s) if self.waits_for_old_leases else 0.0

    def is_leased(self, env: str, lease: str) -> bool:
        """Whether a lease of `env` is held, or may be held without being known yet."""
        return self.waits_for_old_leases or (env, lease) in self._leases

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
        """Whether a producer was refused, and nothing is under way that could change that.

        Then only an incomplete batch can free capacity.
        """
        return self._wanting and not self._leases and self.untrained == 0

    def status(self, run: str) -> AdmissionStatus:
        """Return the status for the batcher: whether nothing more can be admitted, by what has been read."""
        return AdmissionStatus(
            run=run, blocked=self.blocked, last_rollout=self._last_rollout, last_entry=self._last_entry
        )

    def metrics(self) -> dict[str, float]:
        """Return figures for monitoring under `flow/`.

        Once the last step is taken, nothing is outstanding any more.
        """
        bound = {"flow/capacity": self.capacity, "flow/outstanding": self.outstanding}
        return {
            **(bound if self._trained < self._steps else {}),
            "flow/leased": self.leased,
            "flow/accepted": self.accepted,
            "flow/untrained": self.untrained,
            "flow/blocked": float(self.blocked),
            "flow/lost_groups": self._lost_groups,
            "flow/lost_seconds": self._lost_s,
            **{f"flow/{name}": count for name, count in self._counts.items()},
            **({} if self.budget.disk_bytes is None else {"flow/disk_bytes": self.budget.disk_bytes}),
            **{f"flow/fill/{stream}": share for stream, share in self.budget.fill().items()},
        }
